// A bundle on disk: a zip of stored members under one top folder, read as hostile ground. Mirrors
// bundle_format/zip_directory.py, and is stricter: a bundle has no data descriptors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>

#include "format/manifest.h"
#include "format/result.h"

namespace mctl {

struct Entry {
  std::uint64_t offset = 0, size = 0;  // of the data, in bytes of the file
};

// Bytes of a file, mapped privately: writes stay in this process.
class Mapping {
 public:
  Mapping() = default;
  Mapping(Mapping&& other) noexcept { swap(other); }
  Mapping& operator=(Mapping&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Mapping();
  static Result<Mapping> of(int fd, std::uint64_t offset, std::uint64_t size, bool writable);

  std::span<std::byte> bytes() const { return bytes_; }

 private:
  void swap(Mapping& other) noexcept;
  void* base_ = nullptr;  // page-aligned
  std::size_t length_ = 0;
  std::span<std::byte> bytes_;
};

// A descriptor of a file; a FIFO does not make it wait for a writer. Negative: errno says why there is none.
int open_to_read(const std::string& path);

class Archive {
 public:
  // Code::damaged says what breaks the format. The descriptor is borrowed and has to outlive the archive.
  static Result<Archive> open(int fd);

  // Paths are below the top folder.
  const std::map<std::string, Entry, std::less<>>& members() const { return members_; }
  Result<std::string> read(std::string_view member, std::size_t limit) const;
  Result<Mapping> map(std::string_view member, bool writable = false) const;

 private:
  explicit Archive(int fd) : fd_(fd) {}
  Result<Entry> find(std::string_view member) const;

  int fd_;
  std::map<std::string, Entry, std::less<>> members_;
};

// The manifest, whose list of members and their sizes is what the archive has.
Result<Manifest> read_manifest(const Archive& archive);

// The contract as it stands in the manifest: JSON.
Result<std::string> contract_text(const Archive& archive);

// Does a member have the SHA-256 that the manifest says?
Status verify(const Manifest& manifest, std::string_view member, std::span<const std::byte> bytes);

}  // namespace mctl
