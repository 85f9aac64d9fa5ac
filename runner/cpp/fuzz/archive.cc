// A whole bundle file: every range lies inside it, none overlaps another, and what front and worker read ends well.
#include "format/archive.h"

#include <sys/mman.h>
#include <unistd.h>

#include "check.h"
#include "format/layout.h"
#include "format/weights.h"

namespace mctl {
namespace {

// One file in memory for all inputs.
int file_of(std::span<const std::byte> bytes) {
  static const int fd = memfd_create("bundle", MFD_CLOEXEC);
  require(ftruncate(fd, static_cast<off_t>(bytes.size())) == 0, "the file has its size");
  require(pwrite(fd, bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()), "the file is written");
  return fd;
}

void check_ranges(const Archive& archive, std::span<const std::byte> file) {
  std::map<std::uint64_t, std::uint64_t> ends;
  for (const auto& [path, entry] : archive.members()) {
    require(entry.offset <= file.size() && entry.size <= file.size() - entry.offset, "a member lies inside the file");
    if (entry.size > 0) require(ends.emplace(entry.offset, entry.offset + entry.size).second, "a start is a member's");
    const auto mapping = archive.map(path);
    require(mapping && std::ranges::equal(mapping->bytes(), file.subspan(entry.offset, entry.size)),
            "a mapped member has its bytes");
    const auto text = archive.read(path, file.size());
    require(text && std::ranges::equal(std::as_bytes(std::span(*text)), mapping->bytes()), "so has a read one");
  }
  std::uint64_t at = 0;
  for (const auto& [begin, end] : ends) {
    require(begin >= at, "no member overlaps another");
    at = end;
  }
}

// As the worker does it.
void use(const Archive& archive, const Manifest& manifest) {
  auto weights = Weights::map(archive);
  if (weights) {
    for (const Variant& variant : manifest.variants)
      for (const auto& [name, constant] : variant.constants)
        if (const auto tensor = weights->tensor(name, constant))
          require(tensor->shape.size() <= 64, "ranks are bounded");
    weights->reset();
  }
  for (const auto& [path, member] : manifest.members)
    if (auto same = verify(manifest, path, archive.map(path)->bytes()); !same)
      require(!same.error().text.empty(), "a refusal has a reason");
  for (const Golden& golden : manifest.golden)
    if (auto tensors = read_tensors(archive.map(golden.member, true)->bytes()); !tensors)
      require(!tensors.error().text.empty(), "a refusal has a reason");
}

void read(std::span<const std::byte> file) {
  const auto archive = Archive::open(file_of(file));
  if (!archive) return require(!archive.error().text.empty(), "a refusal has a reason");
  check_ranges(*archive, file);
  if (const auto manifest = read_manifest(*archive)) use(*archive, *manifest);
}

}  // namespace
}  // namespace mctl

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  mctl::read(std::as_bytes(std::span(data, size)));
  return 0;
}
