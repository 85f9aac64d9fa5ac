#include "format/bundle_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

#include "format/archive.h"
#include "format/sha256.h"

namespace mctl {
namespace {

bool same(const timespec& a, const timespec& b) { return a.tv_sec == b.tv_sec && a.tv_nsec == b.tv_nsec; }

// Read, not mapped: a file that is cut meanwhile must not end this process.
bool has_digest(int fd, const Entry& entry, const std::string& wanted) {
  Sha256 digest;
  std::vector<std::byte> block(256 << 10);
  for (std::uint64_t done = 0; done < entry.size;) {
    const auto wish = static_cast<std::size_t>(std::min<std::uint64_t>(block.size(), entry.size - done));
    const ssize_t got = pread(fd, block.data(), wish, static_cast<off_t>(entry.offset + done));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    digest.update(std::span(block).first(static_cast<std::size_t>(got)));
    done += static_cast<std::uint64_t>(got);
  }
  return digest.finish() == wanted;
}

bool has_its_digests(int fd, const Manifest& manifest) {
  const auto archive = Archive::open(fd);
  if (!archive || !read_manifest(*archive)) return false;
  return std::ranges::all_of(manifest.members, [&](const auto& listed) {
    const auto found = archive->members().find(listed.first);
    return found != archive->members().end() && has_digest(fd, found->second, listed.second.sha256);
  });
}

}  // namespace

Result<Descriptor> sealed_copy(int fd) {
  const auto failed = [] {
    return Error{Code::host, std::string("the bundle cannot be copied to memory: ") + std::strerror(errno)};
  };
  struct stat about{};
  Descriptor copy(memfd_create("mctl-bundle", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!copy || fstat(fd, &about) != 0) return failed();
  for (off_t done = 0; done < about.st_size;) {
    const ssize_t sent = sendfile(copy.get(), fd, &done, static_cast<std::size_t>(about.st_size - done));
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) return failed();
    if (sent == 0) break;  // it was cut: its directory is missing then
  }
  if (fcntl(copy.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL) != 0) return failed();
  return copy;
}

BundleWatch::BundleWatch(int fd, const Manifest& manifest) : fd_(fd), manifest_(manifest) { fstat(fd, &first_); }

const Error* BundleWatch::spoiled() {
  struct stat now{};
  if (!fault_ && (fstat(fd_, &now) != 0 || !is_whole(now)))
    fault_ = Error{Code::unavailable,
                   "the bundle's file was changed while it was served: load it again, or start the server again"};
  return fault_ ? &*fault_ : nullptr;
}

bool BundleWatch::is_whole(const struct stat& now) {
  if (now.st_size != first_.st_size || !same(now.st_mtim, first_.st_mtim)) return false;
  if (same(now.st_ctim, first_.st_ctim)) return true;
  const bool linked = now.st_nlink != first_.st_nlink;  // a new bundle was renamed over its name, most likely
  first_ = now;
  return linked || has_its_digests(fd_, manifest_);
}

}  // namespace mctl
