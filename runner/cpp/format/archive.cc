#include "format/archive.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <optional>
#include <vector>

#include "format/json.h"
#include "format/layout.h"
#include "format/sha256.h"
#include "format/text.h"

namespace mctl {
namespace {

static_assert(std::endian::native == std::endian::little, "a zip's numbers are read as they stand");

// Sizes of the records of PKWARE's APPNOTE 6.3.10 without their variable parts: sections 4.3.7, 4.3.12 and 4.3.14-16.
constexpr std::size_t kLocal = 30, kCentral = 46, kEnd = 22, kEnd64 = 56, kLocator = 20;
constexpr std::size_t kMaxDirectory = kMaxMembers * (kCentral + kMaxName + 64);
constexpr std::uint64_t kFourGib = 0xffffffff;  // in a 32-bit field: the value stands in the zip64 record
constexpr std::uint16_t kZip64 = 1, kPadding = 0x4246, kUtf8 = 0x0800, kEncrypted = 1;

Error of_member(std::string_view name, std::string_view what) {
  return damaged("member `" + std::string(name.substr(0, 128)) + "` " + std::string(what));
}

// The little-endian number at `at`, which the caller has checked to be inside.
template <class T>
T number(std::string_view bytes, std::size_t at) {
  T value;
  std::memcpy(&value, bytes.substr(at, sizeof value).data(), sizeof value);
  return value;
}

Result<std::string> read_at(int fd, std::uint64_t offset, std::size_t size) {
  std::string bytes(size, '\0');
  for (std::size_t done = 0; done < size;) {
    const ssize_t got = pread(fd, bytes.data() + done, size - done, static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return damaged(std::string("it cannot be read: ") + std::strerror(errno));
    if (got == 0) return damaged("it was cut");
    done += static_cast<std::size_t>(got);
  }
  return bytes;
}

struct Directory {
  std::uint64_t count, size, offset;
};

struct Listed {  // a member as the central directory has it
  std::string name;
  std::uint64_t crc, size, header;
  std::uint16_t flags;
  std::uint32_t attributes;  // what whoever unpacks it makes of it, such as its mode
};

// --- the end of the file --------------------------------------------------------------------------------------------

// The zip64 record stands right before its locator and agrees with the short one. `at` becomes its place.
Result<Directory> read_end64(int fd, std::uint64_t locator_at, const Directory& shorter, std::uint64_t& at) {
  if (locator_at < kEnd64) return damaged("its zip64 end record is cut");
  at = locator_at - kEnd64;
  const auto tail = read_at(fd, at, kEnd64 + kLocator);
  if (!tail) return tail.error();
  const std::string_view record(*tail), locator = record.substr(kEnd64);
  const auto disks = number<std::uint32_t>(locator, 16);
  if (!record.starts_with("PK\6\6") || number<std::uint64_t>(locator, 8) != at ||
      number<std::uint32_t>(locator, 4) != 0 || disks > 1)
    return damaged("its zip64 end record is not where its locator says");
  const Directory full{number<std::uint64_t>(record, 32), number<std::uint64_t>(record, 40),
                       number<std::uint64_t>(record, 48)};
  if (number<std::uint64_t>(record, 4) != kEnd64 - 12 || number<std::uint64_t>(record, 16) != 0 ||
      number<std::uint64_t>(record, 24) != full.count)
    return damaged("its zip64 end record is not plain");
  const auto agrees = [](std::uint64_t brief, std::uint64_t value, std::uint64_t limit) {
    return brief == value || brief == limit;
  };
  if (!agrees(shorter.count, full.count, 0xffff) || !agrees(shorter.size, full.size, kFourGib) ||
      !agrees(shorter.offset, full.offset, kFourGib))
    return damaged("its two end records disagree");
  return full;
}

Result<Directory> read_end(int fd, std::uint64_t file_size) {
  constexpr auto lost = "it does not end with a zip directory: it was cut, or something was added to it";
  if (file_size < kEnd + kLocator) return damaged(lost);
  const auto tail = read_at(fd, file_size - kEnd - kLocator, kLocator + kEnd);
  if (!tail) return tail.error();
  const std::string_view locator(*tail), end = locator.substr(kLocator);
  if (!end.starts_with("PK\5\6")) return damaged(lost);
  Directory found{number<std::uint16_t>(end, 10), number<std::uint32_t>(end, 12), number<std::uint32_t>(end, 16)};
  if (number<std::uint32_t>(end, 4) != 0 || number<std::uint16_t>(end, 8) != found.count ||
      number<std::uint16_t>(end, 20) != 0)
    return damaged("its zip directory has a comment or spans several files");
  std::uint64_t at = file_size - kEnd;
  if (locator.starts_with("PK\6\7")) {
    const auto full = read_end64(fd, at - kLocator, found, at);
    if (!full) return full.error();
    found = *full;
  }
  if (found.count > kMaxMembers || found.size > kMaxDirectory)
    return damaged("it has " + std::to_string(found.count) + " members, allowed " + std::to_string(kMaxMembers));
  if (found.offset > at || at - found.offset != found.size) return damaged("its zip directory is not where it says");
  return found;
}

// --- entries --------------------------------------------------------------------------------------------------------

// Replaces those fields that are at the 32-bit limit by the zip64 record's, in its fixed order. False: does not fit, or
// there is a record of another kind than this and padding: others hold owners, modes, and what a link points to.
bool extend_fields(std::string_view extra, std::initializer_list<std::uint64_t*> fields) {
  std::optional<std::string_view> record;
  while (!extra.empty()) {
    if (extra.size() < 4) return false;
    const std::size_t size = number<std::uint16_t>(extra, 2);
    if (size > extra.size() - 4) return false;
    const auto kind = number<std::uint16_t>(extra, 0);
    if (kind != kZip64 && kind != kPadding) return false;
    if (kind == kZip64) {
      if (record) return false;
      record = extra.substr(4, size);
    }
    extra.remove_prefix(4 + size);
  }
  std::size_t used = 0;
  for (std::uint64_t* field : fields) {
    if (*field != kFourGib) continue;
    if (!record || record->size() < used + 8) return false;
    *field = number<std::uint64_t>(*record, used);
    used += 8;
  }
  return !record || record->size() == used;
}

std::string name_fault(const Listed& member) {
  const auto is_ascii = [](char c) { return static_cast<unsigned char>(c) < 0x80; };
  const bool sound = (member.flags & kUtf8) != 0 ? is_utf8(member.name) : std::ranges::all_of(member.name, is_ascii);
  if (!sound) return "has a name that is not valid UTF-8";
  if (const std::string fault = path_fault(member.name); !fault.empty())
    return "has a name that is not allowed: " + fault;
  return member.name.find('/') == std::string::npos ? "is in no folder" : "";
}

std::string fault_of(const Listed& member, std::uint16_t method, std::uint64_t stored) {
  if (std::string fault = name_fault(member); !fault.empty()) return fault;
  if (member.flags & kEncrypted) return "is encrypted, which is not allowed";
  if (method != 0) return "is compressed, which is not allowed";
  if (member.flags & ~kUtf8) return "has zip flags that are not allowed";
  if (member.attributes != 0) return "is a link, or has a mode or other attributes, which is not allowed";
  return stored != member.size ? "has two sizes" : "";
}

// Takes one entry off the front of the directory.
Result<Listed> take_entry(std::string_view& central) {
  if (central.size() < kCentral || !central.starts_with("PK\1\2"))
    return damaged("its zip directory is shorter than it says");
  const std::size_t name_size = number<std::uint16_t>(central, 28), extra_size = number<std::uint16_t>(central, 30);
  const bool plain = number<std::uint32_t>(central, 32) == 0;  // no comment, first disk
  if (!plain || name_size > kMaxName || central.size() < kCentral + name_size + extra_size)
    return damaged("its zip directory has an entry that is cut, too long or has a comment");
  Listed member{std::string(central.substr(kCentral, name_size)),
                number<std::uint32_t>(central, 16),
                number<std::uint32_t>(central, 24),
                number<std::uint32_t>(central, 42),
                number<std::uint16_t>(central, 8),
                number<std::uint32_t>(central, 38)};
  std::uint64_t stored = number<std::uint32_t>(central, 20);
  if (!extend_fields(central.substr(kCentral + name_size, extra_size), {&member.size, &stored, &member.header}))
    return of_member(member.name, "has a zip64 record that does not fit, or an extra field that is not allowed");
  const auto fault = fault_of(member, number<std::uint16_t>(central, 10), stored);
  if (!fault.empty()) return of_member(member.name, fault);
  central.remove_prefix(kCentral + name_size + extra_size);
  return member;
}

// Where the member's data lies, before `limit`; its local header has to agree with the directory.
Result<Entry> read_local(int fd, const Listed& member, std::uint64_t limit) {
  if (member.header > limit || limit - member.header < kLocal) return of_member(member.name, "has no local header");
  const auto fixed = read_at(fd, member.header, kLocal);
  if (!fixed) return fixed.error();
  const std::size_t name_size = number<std::uint16_t>(*fixed, 26), extra_size = number<std::uint16_t>(*fixed, 28);
  const std::uint64_t data = member.header + kLocal + name_size + extra_size;
  if (data > limit || member.size > limit - data) return of_member(member.name, "reaches beyond the end of the data");
  const auto variable = read_at(fd, member.header + kLocal, name_size + extra_size);
  if (!variable) return variable.error();
  std::uint64_t stored = number<std::uint32_t>(*fixed, 18), size = number<std::uint32_t>(*fixed, 22);
  const bool same = fixed->starts_with("PK\3\4") && variable->substr(0, name_size) == member.name &&
                    extend_fields(std::string_view(*variable).substr(name_size), {&size, &stored}) &&
                    number<std::uint16_t>(*fixed, 6) == member.flags && number<std::uint16_t>(*fixed, 8) == 0 &&
                    number<std::uint32_t>(*fixed, 14) == member.crc && stored == member.size && size == member.size;
  if (!same) return of_member(member.name, "has a local header that disagrees with the directory");
  return Entry{data, member.size};
}

// Members follow one another from the first byte to the directory.
Status check_tiling(std::vector<std::pair<const Listed*, Entry>> members, std::uint64_t end) {
  std::sort(members.begin(), members.end(),
            [](const auto& a, const auto& b) { return a.first->header < b.first->header; });
  std::uint64_t at = 0;
  for (const auto& [listed, entry] : members) {
    if (listed->header < at) return of_member(listed->name, "overlaps another one");
    if (listed->header > at) return of_member(listed->name, "follows bytes that belong to no member");
    at = entry.offset + entry.size;
  }
  if (at != end) return damaged("there are bytes before the zip directory that belong to no member");
  return Done{};
}

}  // namespace

Mapping::~Mapping() {
  if (base_ != nullptr) munmap(base_, length_);
}

void Mapping::swap(Mapping& other) noexcept {
  std::swap(base_, other.base_);
  std::swap(length_, other.length_);
  std::swap(bytes_, other.bytes_);
}

Result<Mapping> Mapping::of(int fd, std::uint64_t offset, std::uint64_t size, bool writable) {
  Mapping mapping;
  if (size == 0) return mapping;
  const std::uint64_t before = offset % static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
  const int protection = writable ? PROT_READ | PROT_WRITE : PROT_READ;
  void* base = mmap(nullptr, size + before, protection, MAP_PRIVATE, fd, static_cast<off_t>(offset - before));
  if (base == MAP_FAILED) return Error{Code::host, std::string("cannot map the bundle: ") + std::strerror(errno)};
  mapping.base_ = base;
  mapping.length_ = size + before;
  mapping.bytes_ = {static_cast<std::byte*>(base) + before, size};
  return mapping;
}

int open_to_read(const std::string& path) { return ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK); }

Result<Archive> Archive::open(int fd) {
  struct stat status;
  if (fstat(fd, &status) != 0 || !S_ISREG(status.st_mode)) return damaged("it is no regular file");
  const auto directory = read_end(fd, static_cast<std::uint64_t>(status.st_size));
  if (!directory) return directory.error();
  const auto bytes = read_at(fd, directory->offset, directory->size);
  if (!bytes) return bytes.error();
  std::vector<Listed> listed;
  std::string_view central(*bytes);
  for (std::uint64_t i = 0; i < directory->count; ++i) {
    auto member = take_entry(central);
    if (!member) return member.error();
    listed.push_back(std::move(*member));
  }
  if (listed.empty() || !central.empty()) return damaged("its zip directory is empty or longer than its entries");

  Archive archive(fd);
  std::vector<std::pair<const Listed*, Entry>> placed;
  const std::string top = listed[0].name.substr(0, listed[0].name.find('/') + 1);
  for (const Listed& member : listed) {
    if (!member.name.starts_with(top)) return of_member(member.name, "is in another top folder than the first");
    const auto entry = read_local(fd, member, directory->offset);
    if (!entry) return entry.error();
    if (!archive.members_.emplace(member.name.substr(top.size()), *entry).second)
      return of_member(member.name, "is there twice");
    placed.emplace_back(&member, *entry);
  }
  if (auto tiled = check_tiling(std::move(placed), directory->offset); !tiled) return tiled.error();
  return archive;
}

Result<Entry> Archive::find(std::string_view member) const {
  const auto found = members_.find(member);
  if (found == members_.end()) return damaged("it has no member `" + std::string(member) + "`");
  return found->second;
}

Result<std::string> Archive::read(std::string_view member, std::size_t limit) const {
  const auto entry = find(member);
  if (!entry) return entry.error();
  if (entry->size > limit) return of_member(member, "has more bytes than are allowed");
  return read_at(fd_, entry->offset, entry->size);
}

Result<Mapping> Archive::map(std::string_view member, bool writable) const {
  const auto entry = find(member);
  return entry ? Mapping::of(fd_, entry->offset, entry->size, writable) : Result<Mapping>(entry.error());
}

Result<Manifest> read_manifest(const Archive& archive) {
  if (!archive.members().contains(kManifest)) return Error{Code::usage, "it is an archive, but no bundle of mctl"};
  const auto text = archive.read(kManifest, kMaxManifest);
  if (!text) return text.error();
  auto manifest = parse_manifest(*text);
  if (!manifest) return manifest;
  for (const auto& [path, entry] : archive.members()) {
    const auto listed = manifest->members.find(path);
    if (path != kManifest && listed == manifest->members.end()) return of_member(path, "is not in the manifest's list");
    if (listed != manifest->members.end() && listed->second.size != entry.size)
      return of_member(path, "has another size than the manifest says");
    if (entry.offset % kAlignment != 0) return of_member(path, "is not on a boundary of 64 bytes");
  }
  for (const auto& [path, member] : manifest->members)
    if (!archive.members().contains(path)) return damaged("it has no member `" + path + "`");
  return manifest;
}

Result<std::string> contract_text(const Archive& archive) {
  const auto text = archive.read(kManifest, kMaxManifest);
  if (!text) return text.error();
  const auto value = parse_json(*text);
  if (!value) return value.error();
  const auto* contract = value->is_object() ? value->get_object().if_contains("contract") : nullptr;
  return contract != nullptr ? boost::json::serialize(*contract) : std::string("null");
}

Status verify(const Manifest& manifest, std::string_view member, std::span<const std::byte> bytes) {
  const auto listed = manifest.members.find(member);
  if (listed == manifest.members.end() || sha256(bytes) != listed->second.sha256)
    return of_member(member, "does not have the SHA-256 that the manifest says");
  return Done{};
}

}  // namespace mctl
