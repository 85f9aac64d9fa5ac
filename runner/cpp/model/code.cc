#include "model/code.h"

#include <dlfcn.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "model/dl.h"
#include "model/unnamed_file.h"

namespace mctl {
namespace {

Error host(std::string text) { return {Code::host, std::move(text)}; }

Status write_all(int fd, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t written = write(fd, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return host(std::strerror(errno));
    bytes = bytes.subspan(static_cast<std::size_t>(written));
  }
  return Done{};
}

}  // namespace

Result<LoadedCode> load_code(const char* name, std::span<const std::byte> bytes) {
  LoadedCode code;
  const auto file = unnamed_file(name, [&](const UnnamedFile& made) -> Status {
    if (auto done = write_all(made.fd, bytes); !done) return done;
    code.library = dlopen(("/proc/self/fd/" + std::to_string(made.fd)).c_str(), RTLD_NOW | RTLD_LOCAL);
    if (code.library == nullptr) return host(dl_error());
    return Done{};
  });
  if (!file) return file.error();
  code.fd = file->fd;
  code.folder = file->folder;
  return code;
}

}  // namespace mctl
