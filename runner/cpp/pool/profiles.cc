#include "pool/profiles.h"

#include <asm/ioctls.h>
#include <fcntl.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>

#include "pool/system_calls.h"

namespace mctl {
namespace {

constexpr std::uint32_t kWrites = O_WRONLY | O_RDWR | O_CREAT | O_TRUNC;
constexpr std::uint32_t kNamespaces =
    CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET;
constexpr std::uint32_t kOfAnotherProcess = 0x80000000;  // a clock's number that holds a process's is negative
constexpr std::uint32_t kIoprioWhoProcess = 1, kAskPersonality = 0xffffffff;

// fcntl: not who gets a signal, leases, locks, a pipe's size, or flags that the front shares.
const std::vector<std::uint32_t> kDescriptorWork = {F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC, F_GET_SEALS};
constexpr std::uint32_t kTerminalSettings = 0x802c542a;  // TCGETS2
const std::vector<std::uint32_t> kQuestions = {TCGETS, kTerminalSettings, TIOCGWINSZ, FIONREAD, FIOCLEX, FIONCLEX};
constexpr std::uint32_t kNameMapping = 0x53564d41;  // PR_SET_VMA
const std::vector<std::uint32_t> kOwnThread = {PR_SET_NAME, PR_GET_NAME, PR_GET_DUMPABLE, kNameMapping};
// To outlive the front, be traced, and gain or keep rights.
const std::vector<std::uint32_t> kWaysOut = {
    PR_SET_PDEATHSIG, PR_SET_DUMPABLE,   PR_SET_PTRACER,  PR_SET_CHILD_SUBREAPER, PR_SET_MM,
    PR_SET_KEEPCAPS,  PR_SET_SECUREBITS, PR_CAPBSET_DROP, PR_CAP_AMBIENT,         62};  // PR_SCHED_CORE

std::vector<Rule> joined(std::initializer_list<std::vector<Rule>> parts) {
  std::vector<Rule> all;
  for (const auto& part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

// --- what neither a front nor a worker needs ------------------------------------------------------------------------

std::vector<Rule> other_processes() {
  std::vector<Rule> rules = {
      {SYS_process_vm_readv},
      {SYS_process_vm_writev},
      {call::process_madvise},
      {call::process_mrelease},
      {call::pidfd_open},
      {call::pidfd_getfd},
      {call::pidfd_send_signal},
      {SYS_kcmp},
      {SYS_migrate_pages},
      // shared memory, messages and semaphores of System V, messages of POSIX
      {SYS_shmget},
      {SYS_shmat},
      {SYS_shmctl},
      {SYS_shmdt},
      {SYS_semget},
      {SYS_semop},
      {SYS_semctl},
      {SYS_semtimedop},
      {SYS_msgget},
      {SYS_msgsnd},
      {SYS_msgrcv},
      {SYS_msgctl},
      {SYS_mq_open},
      {SYS_mq_unlink},
      {SYS_mq_timedsend},
      {SYS_mq_timedreceive},
      {SYS_mq_notify},
      {SYS_mq_getsetattr},
  };
  if (!kSanitized) rules.push_back({SYS_ptrace});
  return rules;
}

std::vector<Rule> the_machine() {
  return {
      {SYS_connect},
      {SYS_clone, Rule::has_bits, 0, {kNamespaces}},
      {SYS_mount},
      {SYS_umount2},
      {SYS_pivot_root},
      {SYS_chroot},
      {SYS_setns},
      {SYS_unshare},
      {call::open_tree},
      {call::open_tree_attr},
      {call::move_mount},
      {call::fsopen},
      {call::fsconfig},
      {call::fsmount},
      {call::fspick},
      {call::mount_setattr},
      {call::statmount},
      {call::listmount},
      {call::listns},
      {SYS_swapon},
      {SYS_swapoff},
      {SYS_quotactl},
      {call::quotactl_fd},
      {SYS_acct},
      {SYS_reboot},
      {SYS_init_module},
      {SYS_finit_module},
      {SYS_delete_module},
      {SYS_kexec_load},
#ifdef SYS_kexec_file_load
      {SYS_kexec_file_load},
#endif
      {SYS_syslog},
      {SYS_sethostname},
      {SYS_setdomainname},
      {SYS_settimeofday},
      {SYS_clock_settime},
      {SYS_clock_adjtime},
      {SYS_adjtimex},
      {SYS_vhangup},
      // typing into the terminal
      {SYS_ioctl, Rule::is, 1, {TIOCSTI, TIOCLINUX}},
#if defined(__x86_64__)
      {SYS_iopl},
      {SYS_ioperm},
      {SYS_modify_ldt},
      {SYS_uselib},
      {SYS_ustat},
      {SYS_sysfs},
      {SYS__sysctl},
#endif
  };
}

std::vector<Rule> large_parts_of_the_kernel() {
  return {
      {SYS_bpf},
      {SYS_perf_event_open},
      {SYS_userfaultfd},
      {call::io_uring_setup},
      {call::io_uring_enter},
      {call::io_uring_register},
      {SYS_add_key},
      {SYS_request_key},
      {SYS_keyctl},
      {SYS_fanotify_init},
      {SYS_fanotify_mark},
      {SYS_name_to_handle_at},
      {SYS_open_by_handle_at},
      {SYS_lookup_dcookie},
      {SYS_nfsservctl},
      {call::lsm_get_self_attr},
      {call::lsm_set_self_attr},
      {call::lsm_list_modules},
  };
}

// --- what a model has no use for ------------------------------------------------------------------------------------

std::vector<Rule> programs_and_sockets() {
  std::vector<Rule> rules = {
      {SYS_execve},
      {SYS_execveat},
      {SYS_socket},
      {SYS_socketpair},
      {SYS_bind},
      {SYS_listen},
      {SYS_accept4},
      {SYS_getsockname},
      {SYS_getpeername},
      // stdout and stderr may be sockets
      {SYS_sendto},
      {SYS_recvfrom},
      {SYS_sendmsg},
      {SYS_recvmsg},
      {SYS_sendmmsg},
      {SYS_recvmmsg},
      {SYS_setsockopt},
      {SYS_getsockopt},
      {SYS_shutdown},
      {SYS_accept},
#if defined(__x86_64__)
      {SYS_fork},
      {SYS_vfork},
#endif
  };
  if (!kSanitized) rules.push_back({SYS_clone, Rule::lacks_bits, 0, {CLONE_THREAD}});
  return rules;
}

// Signals to others, and how they are scheduled. A thread that OpenMP binds to a core is named by its own number, which
// a filter does not know: who asks for that leaves this open.
std::vector<Rule> what_others_do() {
  const auto own = static_cast<std::uint32_t>(getpid());
  std::vector<Rule> rules = {
      {SYS_kill, Rule::is_not, 0, {own}},
      {SYS_tgkill, Rule::is_not, 0, {own}},
      {SYS_tkill},
      {SYS_rt_sigqueueinfo, Rule::is_not, 0, {own}},
      {SYS_rt_tgsigqueueinfo, Rule::is_not, 0, {own}},
      {SYS_timer_create, Rule::has_bits, 0, {kOfAnotherProcess}},
      {SYS_fcntl, Rule::is_not, 1, kDescriptorWork},
      {SYS_ioctl, Rule::is_not, 1, kQuestions},
      {SYS_prlimit64, Rule::is_not, 0, {0, own}},
      {SYS_move_pages, Rule::is_not, 0, {0, own}},
      {SYS_setpriority, Rule::is_not, 0, {PRIO_PROCESS}},
      {SYS_setpriority, Rule::is_not, 1, {0, own}},
      {SYS_ioprio_set, Rule::is_not, 0, {kIoprioWhoProcess}},
      {SYS_ioprio_set, Rule::is_not, 1, {0, own}},
      {SYS_sched_setparam, Rule::is_not, 0, {0, own}},
      {SYS_sched_setscheduler, Rule::is_not, 0, {0, own}},
      {SYS_sched_setattr, Rule::is_not, 0, {0, own}},
      {SYS_setpgid},
      {SYS_setsid},
      {SYS_inotify_init1},
      {SYS_inotify_add_watch},
      {SYS_inotify_rm_watch},
#if defined(__x86_64__)
      {SYS_inotify_init},
#endif
  };
  const auto asked = [](const char* name) { return getenv(name) != nullptr; };
  if (!asked("OMP_PROC_BIND") && !asked("OMP_PLACES") && !asked("GOMP_CPU_AFFINITY") && !asked("KMP_AFFINITY"))
    rules.push_back({SYS_sched_setaffinity, Rule::is_not, 0, {0, own}});
  return rules;
}

std::vector<Rule> own_rights() {
  std::vector<Rule> rules = {
      {SYS_setuid},
      {SYS_setgid},
      {SYS_setreuid},
      {SYS_setregid},
      {SYS_setresuid},
      {SYS_setresgid},
      {SYS_setgroups},
      {SYS_setfsuid},
      {SYS_setfsgid},
      {SYS_capset},
      {SYS_personality, Rule::is_not, 0, {kAskPersonality}},
      {call::landlock_create_ruleset},
      {call::landlock_add_rule},
      {call::landlock_restrict_self},
  };
  if (!kSanitized) rules.push_back({SYS_prctl, Rule::is, 0, kWaysOut});
  return rules;
}

// Files, but for reading.
std::vector<Rule> changes_of_files() {
  return {
      {SYS_openat, Rule::has_bits, 2, {kWrites}},
      {SYS_truncate},
      {SYS_unlinkat},
      {SYS_renameat2},
      {SYS_linkat},
      {SYS_symlinkat},
      {SYS_mkdirat},
      {SYS_mknodat},
      {SYS_fchmod},
      {SYS_fchmodat},
      {call::fchmodat2},
      {SYS_fchown},
      {SYS_fchownat},
      {SYS_setxattr},
      {SYS_lsetxattr},
      {SYS_fsetxattr},
      {call::setxattrat},
      {SYS_removexattr},
      {SYS_lremovexattr},
      {SYS_fremovexattr},
      {call::removexattrat},
      {call::file_setattr},
      {SYS_utimensat},
      {SYS_flock},
      {SYS_sync},
      {SYS_syncfs},
      {SYS_fsync},
      {SYS_fdatasync},
      {SYS_sync_file_range},
      {SYS_sendfile},
      {SYS_splice},
      {SYS_tee},
      {SYS_vmsplice},
      {SYS_copy_file_range},
      {SYS_io_setup},
      {SYS_io_submit},
      {SYS_io_getevents},
      {SYS_io_cancel},
      {SYS_io_destroy},
      {call::cachestat},
#ifdef SYS_renameat
      {SYS_renameat},
#endif
#if defined(__x86_64__)
      {SYS_open, Rule::has_bits, 1, {kWrites}},
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
      {SYS_utime},
      {SYS_utimes},
      {SYS_futimesat},
#endif
  };
}

// The next stage's filter, and pages of the arena that are taken before a size is run for the first time.
std::vector<Rule> needed_to_get_ready() {
  std::vector<Rule> rules = {{SYS_seccomp}, {SYS_fallocate}, {SYS_ftruncate}};
  if (!kSanitized) rules.push_back({SYS_prctl, Rule::is, 0, {PR_SET_SECCOMP}});
  return rules;
}

// --- what a model has use for ---------------------------------------------------------------------------------------

// What glibc, libgomp, libtorch and compiled code call: memory, threads, time, and files to read.
const std::vector<std::uint32_t> kPermitted = {
    // memory
    SYS_mmap,
    SYS_munmap,
    SYS_mremap,
    SYS_mprotect,
    SYS_madvise,
    SYS_brk,
    SYS_mincore,
    SYS_mlock,
    SYS_munlock,
    SYS_mbind,
    SYS_set_mempolicy,
    SYS_get_mempolicy,
    call::set_mempolicy_home_node,
    call::map_shadow_stack,
    call::mseal,
    // threads
    SYS_clone,
    SYS_futex,
    call::futex_waitv,
    call::futex_wake,
    call::futex_wait,
    call::futex_requeue,
    SYS_set_robust_list,
    SYS_get_robust_list,
    SYS_set_tid_address,
    SYS_rseq,
    SYS_membarrier,
    SYS_sched_yield,
    SYS_sched_getaffinity,
    SYS_sched_setaffinity,
    SYS_sched_getparam,
    SYS_sched_getscheduler,
    SYS_getcpu,
    SYS_prctl,
    SYS_exit,
    SYS_exit_group,
    SYS_restart_syscall,
    // signals, of its own process
    SYS_rt_sigaction,
    SYS_rt_sigprocmask,
    SYS_rt_sigreturn,
    SYS_sigaltstack,
    SYS_kill,
    SYS_tgkill,
    // what it is and where it runs
    SYS_getpid,
    SYS_gettid,
    SYS_getppid,
    SYS_getuid,
    SYS_geteuid,
    SYS_getgid,
    SYS_getegid,
    SYS_uname,
    SYS_sysinfo,
    SYS_getrusage,
    SYS_getrlimit,
    SYS_prlimit64,
    SYS_getrandom,
    // time
    SYS_clock_gettime,
    SYS_clock_getres,
    SYS_clock_nanosleep,
    SYS_nanosleep,
    SYS_gettimeofday,
    SYS_times,
    // files and doorbells that are open, files to read
    SYS_ppoll,
    SYS_read,
    SYS_readv,
    SYS_pread64,
    SYS_write,
    SYS_writev,
    SYS_lseek,
    SYS_close,
    SYS_fstat,
    SYS_newfstatat,
    SYS_statx,
    SYS_statfs,
    SYS_fstatfs,
    SYS_openat,
    SYS_faccessat,
    call::faccessat2,
    SYS_readlinkat,
    SYS_getdents64,
    SYS_getcwd,
    SYS_fcntl,
    SYS_ioctl,
    SYS_fadvise64,
    // to get ready
    SYS_seccomp,
    SYS_fallocate,
#if defined(__x86_64__)
    SYS_arch_prctl,
    SYS_open,
    SYS_stat,
    SYS_lstat,
    SYS_access,
    SYS_readlink,
    SYS_getdents,
    SYS_time,

    SYS_pause,
    SYS_poll,
#endif
};

Profile loading(bool strict) {
  Profile profile;
  profile.known_only = true;
  profile.refused = joined({programs_and_sockets(), what_others_do(), own_rights(), changes_of_files()});
  if (!strict) return profile;
  profile.refused.push_back({SYS_prctl, Rule::is_not, 0, kOwnThread});
  profile.permitted = kPermitted;
  return profile;
}

}  // namespace

Profile profile_of(Stage stage, bool strict) {
  switch (stage) {
    case Stage::front:
      return {joined({other_processes(), the_machine(), large_parts_of_the_kernel()})};
    case Stage::loading:
      return loading(strict);
    case Stage::ready:
      return {needed_to_get_ready()};
  }
  return {};
}

}  // namespace mctl
