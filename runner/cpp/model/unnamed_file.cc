#include "model/unnamed_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace mctl {
namespace {

constexpr unsigned kNoExecSeal = 8;  // MFD_NOEXEC_SEAL: it will never be a program, which is what some systems forbid

int in_memory(const char* name) {
  const int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING | kNoExecSeal);
  return fd < 0 && errno == EINVAL ? memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING) : fd;
}

int in_folder(const std::string& folder) {
  const int fd = open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC | O_EXCL, 0600);
  if (fd >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL)) return fd;
  std::string path = folder + "/mctl-XXXXXX";  // a file system that makes no files without names
  const int named = mkostemp(path.data(), O_CLOEXEC);
  if (named >= 0) unlink(path.c_str());
  return named;
}

// The empty one is memory.
std::vector<std::string> places() {
  std::vector<std::string> found = {""};
  const auto add = [&](const char* folder) {
    if (folder != nullptr && folder[0] == '/') found.emplace_back(folder);
  };
  add(std::getenv("XDG_RUNTIME_DIR"));
  add("/dev/shm");
  add(std::getenv("TMPDIR"));
  add("/tmp");
  return found;
}

}  // namespace

Result<UnnamedFile> unnamed_file(const char* name, const std::function<Status(const UnnamedFile&)>& use) {
  std::string reasons;
  for (const std::string& folder : places()) {
    const UnnamedFile file{folder.empty() ? in_memory(name) : in_folder(folder), folder};
    const Status used = file.fd < 0 ? Error{Code::host, std::strerror(errno)} : use(file);
    if (used) return file;
    if (file.fd >= 0) close(file.fd);
    reasons += (reasons.empty() ? "memfd: " : "; `" + folder + "`: ") + used.error().text;
  }
  return Error{Code::host, reasons + "; name a folder for such files with TMPDIR"};
}

}  // namespace mctl
