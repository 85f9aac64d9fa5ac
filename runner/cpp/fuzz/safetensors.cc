// A safetensors member: what is found lies inside it, on its boundary, and is as large as its shape says.
#include "format/safetensors.h"

#include <algorithm>
#include <cstring>

#include "check.h"
#include "format/layout.h"

namespace mctl {
namespace {

// Bytes that begin with `{` are a header's JSON up to the first zero byte, with the data behind it: most changes to
// them keep header and size together.
std::vector<std::byte> framed(std::span<const std::byte> input) {
  if (input.empty() || input[0] != std::byte{'{'}) return {input.begin(), input.end()};
  const auto end = std::ranges::find(input, std::byte{0});
  std::vector<std::byte> member(sizeof(std::uint64_t));
  member.insert(member.end(), input.begin(), end);
  while (member.size() % kAlignment != 0) member.push_back(std::byte{' '});
  const std::uint64_t size = member.size() - sizeof size;
  std::memcpy(member.data(), &size, sizeof size);
  if (end != input.end()) member.insert(member.end(), end + 1, input.end());
  return member;
}

void read(std::vector<std::byte> member) {
  const auto tensors = read_tensors(member);
  if (!tensors) return require(!tensors.error().text.empty(), "a refusal has a reason");
  std::vector<std::span<std::byte>> found;
  for (const auto& [name, tensor] : *tensors) {
    std::size_t size = item_size(tensor.dtype);
    for (const std::int64_t axis : tensor.shape) size *= static_cast<std::size_t>(axis);
    require(tensor.data.size() == size, "a tensor is as large as its shape says");
    if (size == 0) continue;
    const auto offset = tensor.data.data() - member.data();
    require(offset >= 8 && tensor.data.size() <= member.size() - static_cast<std::size_t>(offset), "it lies inside");
    require(offset % static_cast<std::ptrdiff_t>(kAlignment) == 0, "it lies on its boundary");
    std::ranges::fill(tensor.data, std::byte{1});  // a golden case's inputs are written to
    found.push_back(tensor.data);
  }
  std::ranges::sort(found, {}, [](auto data) { return data.data(); });
  for (std::size_t i = 1; i < found.size(); ++i)
    require(found[i - 1].data() + found[i - 1].size() <= found[i].data(), "no tensor overlaps another");
}

}  // namespace
}  // namespace mctl

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  mctl::read(mctl::framed(std::as_bytes(std::span(data, size))));
  return 0;
}
