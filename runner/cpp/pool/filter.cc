#include "pool/filter.h"

#include <linux/audit.h>
#include <linux/seccomp.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <string>

#include "pool/system_calls.h"

namespace mctl {
namespace {

#if defined(__x86_64__)
constexpr std::uint32_t kArchitecture = AUDIT_ARCH_X86_64;
#elif defined(__aarch64__)
constexpr std::uint32_t kArchitecture = AUDIT_ARCH_AARCH64;
#endif
constexpr std::uint32_t kX32 = 0x40000000;  // another numbering of the same calls
constexpr std::uint32_t kRefuse = SECCOMP_RET_ERRNO | EPERM, kAbsent = SECCOMP_RET_ERRNO | ENOSYS;

class Assembler {
 public:
  explicit Assembler(const Profile& profile) {
    load(offsetof(seccomp_data, arch));
    test(BPF_JEQ, kArchitecture, 1, 0);
    end(kRefuse);
    load_number();
#if defined(__x86_64__)
    end_if(BPF_JGE, kX32, kRefuse);
#endif
    // Their arguments lie in memory, where a filter cannot look: libc does without them.
    end_if(BPF_JEQ, call::clone3, kAbsent);
    end_if(BPF_JEQ, call::openat2, kAbsent);
    if (profile.known_only) end_if(BPF_JGT, kLastCall, kAbsent);
    for (const Rule& rule : profile.refused) add(rule);
    for (const std::uint32_t number : profile.permitted) end_if(BPF_JEQ, number, SECCOMP_RET_ALLOW);
    end(profile.permitted.empty() ? SECCOMP_RET_ALLOW : kRefuse);
  }

  std::vector<sock_filter> take() { return std::move(program_); }

 private:
  void add(const Rule& rule) {
    if (rule.when == Rule::always) return end_if(BPF_JEQ, rule.call, kRefuse);
    const bool bits = rule.when == Rule::has_bits || rule.when == Rule::lacks_bits;
    const bool refused_if_true = rule.when == Rule::has_bits || rule.when == Rule::is;
    const auto count = rule.values.size();
    test(BPF_JEQ, rule.call, 0, count + (refused_if_true ? 4 : 3));  // to the end of the rule
    load(offsetof(seccomp_data, args) + 8 * rule.argument);          // its lower half: all are little-endian
    for (std::size_t i = 0; i < count; ++i) test(bits ? BPF_JSET : BPF_JEQ, rule.values[i], count - i, 0);
    if (refused_if_true) program_.push_back(BPF_STMT(BPF_JMP | BPF_JA, 1));
    end(kRefuse);
    load_number();
  }

  void load(std::size_t offset) {
    program_.push_back(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, static_cast<std::uint32_t>(offset)));
  }
  void load_number() { load(offsetof(seccomp_data, nr)); }
  void end(std::uint32_t answer) { program_.push_back(BPF_STMT(BPF_RET | BPF_K, answer)); }
  void test(int comparison, std::uint32_t value, std::size_t yes, std::size_t no) {  // how many steps to jump over
    program_.push_back(BPF_JUMP(static_cast<std::uint16_t>(BPF_JMP | BPF_K | comparison), value,
                                static_cast<std::uint8_t>(yes), static_cast<std::uint8_t>(no)));
  }
  void end_if(int comparison, std::uint32_t value, std::uint32_t answer) {
    test(comparison, value, 0, 1);
    end(answer);
  }

  std::vector<sock_filter> program_;
};

}  // namespace

std::vector<sock_filter> program_of(const Profile& profile) { return Assembler(profile).take(); }

Status install(const std::vector<sock_filter>& program) {
  auto steps = program;
  const sock_fprog filter{static_cast<unsigned short>(steps.size()), steps.data()};
  const long done = syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &filter);
  if (done == 0) return Done{};
  return Error{Code::host, std::string("the kernel takes no seccomp filter: ") +
                               (done > 0 ? "a thread has another one" : std::strerror(errno))};
}

}  // namespace mctl
