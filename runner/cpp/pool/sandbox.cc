#include "pool/sandbox.h"

#include <link.h>
#include <linux/capability.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <optional>

#include "pool/landlock.h"

namespace mctl {
namespace {

// What libraries are found and loaded with, and what they ask of the machine.
constexpr const char* kSystem[] = {"/usr",       "/lib",      "/lib64",      "/nix/store",
                                   "/gnu/store", "/proc",     "/sys",        "/etc/ld.so.cache",
                                   "/dev/null",  "/dev/zero", "/dev/random", "/dev/urandom"};

Status drop_capabilities() {
  __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
  const __user_cap_data_struct none[2] = {};
  if (syscall(SYS_capset, &header, none) == 0) return Done{};
  return Error{Code::host, std::string("capabilities cannot be dropped: ") + std::strerror(errno)};
}

// Landlock and capabilities are a thread's own.
Status check_alone() {
  std::error_code ec;
  const std::filesystem::directory_iterator threads("/proc/self/task", ec);
  if (ec || std::distance(begin(threads), end(threads)) != 1)
    return Error{Code::host, "a library that was loaded has started threads, which cannot be confined"};
  return Done{};
}

// The folders that libraries came from: they may load more from there.
void add_folders_of_libraries(std::vector<std::string>& folders) {
  const auto add = [](dl_phdr_info* library, std::size_t, void* found) {
    const std::string path = library->dlpi_name;
    if (const auto slash = path.rfind('/'); slash != std::string::npos && slash > 0)
      static_cast<std::vector<std::string>*>(found)->push_back(path.substr(0, slash));
    return 0;
  };
  dl_iterate_phdr(add, &folders);
}

Status fence_in_reads(const Confinement& wanted) {
  if (auto alone = check_alone(); !alone) return alone;
  std::vector<std::string> readable(std::begin(kSystem), std::end(kSystem));
  readable.insert(readable.end(), wanted.readable.begin(), wanted.readable.end());
  add_folders_of_libraries(readable);
  return fence_in(readable);
}

Status confine_thread(const Confinement& wanted) {
  if (auto dropped = drop_capabilities(); !dropped) return dropped;
  if (wanted.strict) return fence_in_reads(wanted);
  static_cast<void>(static_cast<bool>(fence_in(std::nullopt)));  // where there is none, there is still seccomp
  return Done{};
}

}  // namespace

Status confine(Stage stage, const Confinement& wanted) {
  if (stage != Stage::ready && prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0)
    return Error{Code::host, std::strerror(errno)};
  const Status thread = stage == Stage::loading ? confine_thread(wanted) : Status(Done{});
  const Status calls = install(program_of(profile_of(stage, wanted.strict)));
  return calls ? thread : calls;
}

void hide_memory() {
  const rlimit none{};
  setrlimit(RLIMIT_CORE, &none);
  prctl(PR_SET_DUMPABLE, 0);
}

}  // namespace mctl
