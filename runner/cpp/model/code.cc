#include "model/code.h"

#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "model/dl.h"

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

Result<UnnamedFile> file_of_code(const char* name, std::span<const std::byte> bytes) {
  return unnamed_file(name, [&](const UnnamedFile& made) -> Status {
    if (auto done = write_all(made.fd, bytes); !done) return done;
    void* page = mmap(nullptr, 1, PROT_READ | PROT_EXEC, MAP_PRIVATE, made.fd, 0);  // some places hold no programs
    if (page == MAP_FAILED) return host(std::strerror(errno));
    munmap(page, 1);
    return Done{};
  });
}

Result<void*> load_code(const UnnamedFile& file) {
  void* library = dlopen(("/proc/self/fd/" + std::to_string(file.fd)).c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return host(dl_error());
  return library;
}

}  // namespace mctl
