#include "pool/sandbox.h"

#include <asm/ioctls.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace mctl {
namespace {

#if defined(__x86_64__)
constexpr std::uint32_t kArchitecture = AUDIT_ARCH_X86_64;
#elif defined(__aarch64__)
constexpr std::uint32_t kArchitecture = AUDIT_ARCH_AARCH64;
#endif
constexpr std::uint32_t kX32 = 0x40000000;  // another numbering of the same calls

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;  // the search for leaks at exit starts a process that looks into this one
#else
constexpr bool kSanitized = false;
#endif

// Newer than the headers that some build with; the same on all architectures.
enum NewCall : std::uint32_t {
  kPidfdSendSignal = 424,
  kIoUringSetup,
  kIoUringEnter,
  kIoUringRegister,
  kOpenTree,
  kMoveMount,
  kFsopen,
  kFsconfig,
  kFsmount,
  kFspick,
  kPidfdOpen,
  kClone3,
  kOpenat2 = 437,
  kPidfdGetfd,
  kProcessMadvise = 440,
  kMountSetattr = 442,
  kFchmodat2 = 452,
};

constexpr std::uint32_t kWrites = O_WRONLY | O_RDWR | O_CREAT | O_TRUNC;
constexpr std::uint32_t kNamespaces =
    CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET;

// Refused: always, or by one of the call's arguments.
struct Rule {
  std::uint32_t call;
  enum When { always, has_bits, lacks_bits, is, is_not } when = always;
  std::uint32_t argument = 0, value = 0;
};

std::vector<Rule> never_needed() {
  std::vector<Rule> rules = {
      {SYS_connect},
      {SYS_open_by_handle_at},
      {SYS_clone, Rule::has_bits, 0, kNamespaces},
      // other processes
      {SYS_process_vm_readv},
      {SYS_process_vm_writev},
      {kProcessMadvise},
      {kPidfdOpen},
      {kPidfdGetfd},
      {kPidfdSendSignal},
      {SYS_kcmp},
      // the machine
      {SYS_mount},
      {SYS_umount2},
      {SYS_pivot_root},
      {SYS_chroot},
      {SYS_setns},
      {SYS_unshare},
      {kOpenTree},
      {kMoveMount},
      {kFsopen},
      {kFsconfig},
      {kFsmount},
      {kFspick},
      {kMountSetattr},
      {SYS_swapon},
      {SYS_swapoff},
      {SYS_quotactl},
      {SYS_acct},
      {SYS_reboot},
      {SYS_init_module},
      {SYS_finit_module},
      {SYS_delete_module},
      {SYS_kexec_load},
      {SYS_syslog},
      {SYS_sethostname},
      {SYS_setdomainname},
      {SYS_settimeofday},
      {SYS_clock_settime},
      {SYS_clock_adjtime},
      {SYS_adjtimex},
      // large parts of the kernel
      {SYS_bpf},
      {SYS_perf_event_open},
      {SYS_userfaultfd},
      {kIoUringSetup},
      {kIoUringEnter},
      {kIoUringRegister},
      {SYS_add_key},
      {SYS_request_key},
      {SYS_keyctl},
      // typing into the terminal
      {SYS_ioctl, Rule::is, 1, TIOCSTI},
      {SYS_ioctl, Rule::is, 1, TIOCLINUX},
#ifdef SYS_kexec_file_load
      {SYS_kexec_file_load},
#endif
#if defined(__x86_64__)
      {SYS_iopl},
      {SYS_ioperm},
      {SYS_modify_ldt},
#endif
  };
  if (!kSanitized) rules.push_back({SYS_ptrace});
  return rules;
}

std::vector<Rule> of_no_use_to_a_model() {
  const auto own = static_cast<std::uint32_t>(getpid());
  std::vector<Rule> rules = {
      {SYS_execve},
      {SYS_execveat},
      {SYS_socket},
      {SYS_socketpair},
      {SYS_bind},
      {SYS_listen},
      {SYS_accept4},
      {SYS_kill, Rule::is_not, 0, own},
      {SYS_tgkill, Rule::is_not, 0, own},
      {SYS_tkill},
      {SYS_rt_sigqueueinfo, Rule::is_not, 0, own},
      {SYS_rt_tgsigqueueinfo, Rule::is_not, 0, own},
      {SYS_prlimit64, Rule::is_not, 0, 0},
      // files, but for reading
      {SYS_openat, Rule::has_bits, 2, kWrites},
      {SYS_truncate},
      {SYS_ftruncate},
      {SYS_fallocate},
      {SYS_unlinkat},
      {SYS_renameat2},
      {SYS_linkat},
      {SYS_symlinkat},
      {SYS_mkdirat},
      {SYS_mknodat},
      {SYS_fchmod},
      {SYS_fchmodat},
      {kFchmodat2},
      {SYS_fchown},
      {SYS_fchownat},
      {SYS_setxattr},
      {SYS_lsetxattr},
      {SYS_fsetxattr},
#ifdef SYS_renameat
      {SYS_renameat},
#endif
#if defined(__x86_64__)
      {SYS_accept},
      {SYS_fork},
      {SYS_vfork},
      {SYS_open, Rule::has_bits, 1, kWrites},
      {SYS_creat},
      {SYS_unlink},
      {SYS_rename},
      {SYS_link},
      {SYS_symlink},
      {SYS_mkdir},
      {SYS_rmdir},
      {SYS_mknod},
      {SYS_chmod},
      {SYS_chown},
      {SYS_lchown},
#endif
  };
  if (!kSanitized) rules.push_back({SYS_clone, Rule::lacks_bits, 0, CLONE_THREAD});
  return rules;
}

// The program that the kernel runs before each call.
class Filter {
 public:
  Filter() {
    load(offsetof(seccomp_data, arch));
    unless(BPF_JEQ, kArchitecture, EPERM);
    load(offsetof(seccomp_data, nr));
#if defined(__x86_64__)
    refuse_if(BPF_JGE, kX32, EPERM);
#endif
    // Their arguments lie in memory, where a filter cannot look: libc does without them.
    refuse_if(BPF_JEQ, kClone3, ENOSYS);
    refuse_if(BPF_JEQ, kOpenat2, ENOSYS);
  }

  void add(const Rule& rule) {
    if (rule.when == Rule::always) return refuse_if(BPF_JEQ, rule.call, EPERM);
    program_.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, rule.call, 0, 4));
    load(offsetof(seccomp_data, args) + 8 * rule.argument);  // its lower half: both architectures are little-endian
    const bool bits = rule.when == Rule::has_bits || rule.when == Rule::lacks_bits;
    const bool wanted = rule.when == Rule::has_bits || rule.when == Rule::is;
    const auto test = static_cast<std::uint16_t>(bits ? BPF_JSET : BPF_JEQ);
    wanted ? refuse_if(test, rule.value, EPERM) : unless(test, rule.value, EPERM);
    load(offsetof(seccomp_data, nr));
  }

  Status install() {
    program_.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
    const sock_fprog program{static_cast<unsigned short>(program_.size()), program_.data()};
    const long done = syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program);
    if (done == 0) return Done{};
    return Error{Code::host, std::string("the kernel takes no seccomp filter: ") +
                                 (done > 0 ? "a thread has another one" : std::strerror(errno))};
  }

 private:
  void load(std::size_t offset) {
    program_.push_back(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, static_cast<std::uint32_t>(offset)));
  }
  void refuse_if(std::uint16_t test, std::uint32_t value, std::uint32_t error) { jump(test, value, 0, 1, error); }
  void unless(std::uint16_t test, std::uint32_t value, std::uint32_t error) { jump(test, value, 1, 0, error); }
  void jump(std::uint16_t test, std::uint32_t value, std::uint8_t yes, std::uint8_t no, std::uint32_t error) {
    program_.push_back(BPF_JUMP(static_cast<std::uint16_t>(BPF_JMP | BPF_K | test), value, yes, no));
    program_.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | error));
  }

  std::vector<sock_filter> program_;
};

}  // namespace

Status confine(Role role) {
  const rlimit none{};
  setrlimit(RLIMIT_CORE, &none);  // the memory holds clients' data
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) return Error{Code::host, std::strerror(errno)};
  Filter filter;
  for (const Rule& rule : role == Role::front ? never_needed() : of_no_use_to_a_model()) filter.add(rule);
  return filter.install();
}

}  // namespace mctl
