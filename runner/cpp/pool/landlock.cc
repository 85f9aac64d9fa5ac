#include "pool/landlock.h"

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>

#include "pool/system_calls.h"

namespace mctl {
namespace {

// As linux/landlock.h has them, which is newer than the headers that some build with.
struct Ruleset {
  std::uint64_t files, network, scoped;
};
struct [[gnu::packed]] PathRule {
  std::uint64_t allowed;
  std::int32_t parent;
};
constexpr std::uint32_t kVersion = 1, kPathBeneath = 1;
constexpr std::uint64_t kReadFile = 1 << 2, kReadFolder = 1 << 3, kReads = kReadFile | kReadFolder;
constexpr std::uint64_t kTcp = 3, kAbstractSocketsAndSignals = 3;

// All rights but those to read that a version of Landlock knows.
std::uint64_t changes(long version) {
  constexpr int kRights[] = {13, 14, 15, 15, 16};  // how many there are in versions 1 to 5
  return ((1ULL << kRights[std::min(version, 5L) - 1]) - 1) & ~kReads;
}

void allow_reading(int ruleset, const std::string& path) {
  const int parent = open(path.c_str(), O_PATH | O_CLOEXEC);
  if (parent < 0) return;
  PathRule rule{kReads, parent};
  if (syscall(call::landlock_add_rule, ruleset, kPathBeneath, &rule, 0) != 0) {
    rule.allowed = kReadFile;  // it is no folder
    syscall(call::landlock_add_rule, ruleset, kPathBeneath, &rule, 0);
  }
  close(parent);
}

}  // namespace

Status fence_in(const std::optional<std::vector<std::string>>& readable) {
  const auto failed = [] {
    return Error{Code::host, std::string("the kernel has no Landlock: ") + std::strerror(errno)};
  };
  const long version = syscall(call::landlock_create_ruleset, nullptr, 0, kVersion);
  if (version < 1) return failed();
  const Ruleset rights{changes(version) | (readable ? kReads : 0), version >= 4 ? kTcp : 0,
                       version >= 6 ? kAbstractSocketsAndSignals : 0};
  const std::size_t known = version >= 6 ? 24 : version >= 4 ? 16 : 8;  // bytes of Ruleset
  const int ruleset = static_cast<int>(syscall(call::landlock_create_ruleset, &rights, known, 0));
  if (ruleset < 0) return failed();
  for (const std::string& path : readable.value_or(std::vector<std::string>{})) allow_reading(ruleset, path);
  const long done = syscall(call::landlock_restrict_self, ruleset, 0);
  const Status fenced = done == 0 ? Status(Done{}) : failed();
  close(ruleset);
  return fenced;
}

}  // namespace mctl
