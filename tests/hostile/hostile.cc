// A model that attacks: as soon as it is loaded, and again when it is asked to. hostile.py names what it tries.
//
// x: int64 [batch, 2], rows of (action, which). y: int64 [batch, 1]: 0 where it succeeded, else errno.
#include <fcntl.h>
#include <linux/fs.h>
#include <mqueue.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/msg.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/sem.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "aoti_model.h"

namespace {

enum Action : int64_t { answer = 1, attack_at_load, attack_now, call_at_load, call_now };

constexpr int64_t kCalls = 600, kNotTried = -1;
constexpr const char* kReadable = "/proc/self/exe";  // the model's user owns it, or may at least read it

std::string of_front(const char* file) { return "/proc/" + std::to_string(getppid()) + "/" + file; }

int on_file(const std::function<long(int)>& use) {
  const int fd = open(kReadable, O_RDONLY);
  const long done = fd < 0 ? -1 : use(fd);
  const int error = errno;
  close(fd);
  errno = error;
  return done < 0 ? -1 : 0;
}

int on_pipe(const std::function<long(int)>& use) {
  int ends[2];
  if (pipe(ends) != 0) return -1;
  const long done = use(ends[0]);
  const int error = errno;
  close(ends[0]);
  close(ends[1]);
  errno = error;
  return done < 0 ? -1 : 0;
}

void* nothing(void* given) { return given; }

int thread() {
  pthread_t made;
  if ((errno = pthread_create(&made, nullptr, nothing, nullptr)) != 0) return -1;
  return pthread_join(made, nullptr);
}

int run_program() {
  const pid_t child = fork();
  if (child == 0) {
    execl("/bin/true", "true", nullptr);
    _exit(1);
  }
  return child < 0 ? -1 : waitpid(child, nullptr, 0) < 0 ? -1 : 0;
}

int timer_on(clockid_t clock) {
  timer_t timer;
  sigevent event{};
  event.sigev_notify = SIGEV_NONE;
  if (timer_create(clock, &event, &timer) != 0) return -1;
  return timer_delete(timer);
}

int timer_on_front() {
  clockid_t clock;
  if ((errno = clock_getcpuclockid(getppid(), &clock)) != 0) return -1;
  return timer_on(clock);
}

int bind_to_core(pid_t pid) {
  cpu_set_t cores;
  sched_getaffinity(0, sizeof cores, &cores);
  return sched_setaffinity(pid, sizeof cores, &cores);
}

int read_byte(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY);
  char byte;
  const ssize_t got = fd < 0 ? -1 : read(fd, &byte, 1);
  const int error = errno;
  close(fd);
  errno = error;
  return got < 0 ? -1 : 0;
}

// The order is that of hostile.py.
const std::vector<std::function<int()>> kAttempts = {
    // what a model may
    thread,
    [] { return read_byte("/proc/self/maps"); },
    [] {
      return mmap(nullptr, 4096, PROT_READ | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) == MAP_FAILED ? -1 : 0;
    },
    [] { return raise(0); },
    [] { return bind_to_core(0); },
    [] { return fcntl(2, F_GETFL) < 0 ? -1 : 0; },
    // signals
    [] { return kill(getppid(), 0); },
    [] { return kill(0, 0); },
    [] { return kill(-1, 0); },
    [] { return static_cast<int>(syscall(SYS_tkill, getppid(), 0)); },
    [] { return on_pipe([](int fd) { return fcntl(fd, F_SETOWN, getppid()); }); },
    [] {
      return on_pipe([](int fd) {
        const f_owner_ex owner{F_OWNER_PID, getppid()};
        return fcntl(fd, F_SETOWN_EX, &owner);
      });
    },
    [] { return on_pipe([](int fd) { return fcntl(fd, F_SETSIG, SIGKILL); }); },
    [] { return on_pipe([](int fd) { return fcntl(fd, F_SETFL, O_ASYNC); }); },
    [] {
      return on_pipe([](int fd) {
        int on = 1;
        return ioctl(fd, FIOASYNC, &on);
      });
    },
    [] { return on_file([](int fd) { return fcntl(fd, F_SETLEASE, F_RDLCK); }); },
    [] {
      const int folder = open("/", O_RDONLY);
      const int done = fcntl(folder, F_NOTIFY, DN_CREATE);
      const int error = errno;
      close(folder);
      errno = error;
      return done;
    },
    [] { return static_cast<int>(syscall(SYS_mq_notify, -1, nullptr)); },
    timer_on_front,
    // how others run
    [] { return bind_to_core(getppid()); },
    [] { return setpriority(PRIO_PROCESS, static_cast<id_t>(getppid()), 19); },
    [] { return setpriority(PRIO_USER, 0, 19); },
    [] { return static_cast<int>(syscall(SYS_ioprio_set, 1, getppid(), 3 << 13)); },
    [] {
      const sched_param none{};
      return sched_setscheduler(getppid(), SCHED_IDLE, &none);
    },
    [] {
      const rlimit none{};
      return prlimit(getppid(), RLIMIT_CORE, &none, nullptr);
    },
    [] {
      rlimit found{};
      return prlimit(getppid(), RLIMIT_NOFILE, nullptr, &found);
    },
    [] { return static_cast<int>(syscall(SYS_migrate_pages, getppid(), 0, nullptr, nullptr)); },
    // memory of the front
    [] { return read_byte(of_front("mem")); },
    [] { return read_byte(of_front("environ")); },
    [] { return read_byte(of_front("maps")); },
    [] { return open(of_front("mem").c_str(), O_RDWR) < 0 ? -1 : 0; },
    [] { return static_cast<int>(syscall(SYS_process_vm_readv, getppid(), nullptr, 0, nullptr, 0, 0)); },
    [] { return static_cast<int>(syscall(SYS_ptrace, 16 /* attach */, getppid(), nullptr, nullptr)); },
    // programs, sockets, files
    run_program,
    [] { return socket(AF_INET, SOCK_DGRAM, 0) < 0 ? -1 : 0; },
    [] { return socket(AF_UNIX, SOCK_STREAM, 0) < 0 ? -1 : 0; },
    [] {
      const int fd = open("/tmp/.attempt", O_WRONLY | O_CREAT, 0600);
      if (fd >= 0) unlink("/tmp/.attempt");
      return fd < 0 ? -1 : 0;
    },
    [] { return open("/dev/shm", O_TMPFILE | O_RDWR, 0600) < 0 ? -1 : 0; },
    [] { return open("/dev/null", O_RDWR) < 0 ? -1 : 0; },
    [] { return unlink("/nowhere/at/all"); },
    [] { return truncate(kReadable, 0); },
    [] { return chmod(kReadable, 0777); },
    [] { return utimensat(AT_FDCWD, kReadable, nullptr, 0); },
    [] { return setxattr(kReadable, "user.x", "x", 1, 0); },
    [] { return removexattr(kReadable, "user.x"); },
    [] { return static_cast<int>(syscall(463 /* setxattrat */, AT_FDCWD, kReadable, 0, "user.x", nullptr, 0)); },
    [] { return static_cast<int>(syscall(466 /* removexattrat */, AT_FDCWD, kReadable, 0, "user.x")); },
    [] { return static_cast<int>(syscall(469 /* file_setattr */, AT_FDCWD, kReadable, nullptr, 0, 0)); },
    [] {
      return on_file([](int fd) {
        int flags = 0;
        return ioctl(fd, FS_IOC_SETFLAGS, &flags);
      });
    },
    [] { return on_file([](int fd) { return flock(fd, LOCK_EX | LOCK_NB); }); },
    [] {
      return on_file([](int fd) {
        struct flock whole{};
        whole.l_type = F_RDLCK;
        return fcntl(fd, F_SETLK, &whole);
      });
    },
    [] { return static_cast<int>(syscall(SYS_sync)); },
    // what processes share
    [] { return shmget(IPC_PRIVATE, 4096, 0600) < 0 ? -1 : 0; },
    [] { return semget(IPC_PRIVATE, 1, 0600) < 0 ? -1 : 0; },
    [] { return msgget(IPC_PRIVATE, 0600) < 0 ? -1 : 0; },
    [] { return static_cast<int>(syscall(SYS_mq_open, "attempt", O_RDWR | O_CREAT, 0600, nullptr)) < 0 ? -1 : 0; },
    [] { return fcntl(2, F_SETFL, fcntl(2, F_GETFL) | O_NONBLOCK); },
    [] { return shutdown(2, SHUT_RDWR); },
    // watching, the kernel
    [] { return static_cast<int>(syscall(SYS_inotify_init1, 0)); },
    [] { return static_cast<int>(syscall(SYS_fanotify_init, 0, 0)); },
    [] { return static_cast<int>(syscall(467 /* open_tree_attr */, AT_FDCWD, "/", 0, nullptr, 0)); },
    [] { return static_cast<int>(syscall(SYS_bpf, 0, nullptr, 0)); },
    [] { return static_cast<int>(syscall(425 /* io_uring_setup */, 1, nullptr)); },
    [] { return static_cast<int>(syscall(SYS_userfaultfd, 0)); },
    // to outlive the front, to be traced
    [] { return prctl(PR_SET_PDEATHSIG, 0); },
    [] { return setsid() < 0 ? -1 : 0; },
    [] { return prctl(PR_SET_DUMPABLE, 1); },
    [] { return prctl(PR_SET_PTRACER, -1); },
    // which a strict sandbox refuses
    [] { return read_byte("hostile.pt2"); },
};

int64_t attempt(std::size_t which) {
  errno = 0;
  return kAttempts.at(which)() == 0 ? 0 : errno;
}

// Of what would end the process, stop it for good, or split it, only the table is known.
bool is_left_out(int64_t number) {
  constexpr int64_t kUretprobe = 335, kUprobe = 336;  // they end whoever has no such probe
  const int64_t numbers[] = {
      SYS_exit,  SYS_exit_group, SYS_rt_sigreturn,
#if defined(__x86_64__)
      SYS_pause, SYS_fork,       SYS_vfork,        kUretprobe, kUprobe,
#endif
  };
  for (const int64_t left_out : numbers)
    if (number == left_out) return true;
  return false;
}

// Arguments that every call refuses: a descriptor, an address, a size and flags that are not there.
int64_t call(int64_t number) {
  if (is_left_out(number)) return kNotTried;
  errno = 0;
  const long done = syscall(number, -1L, -1L, -1L, -1L, -1L, -1L);
  const int error = done == -1 ? errno : 0;
#if defined(__x86_64__)
  if (number == SYS_alarm) syscall(SYS_alarm, 0);
#endif
  return error;
}

struct AtLoad {
  std::vector<int64_t> attempts, calls;
  AtLoad() {
    if (getenv("ATTACK_AT_LOAD") == nullptr) return;
    for (std::size_t which = 0; which < kAttempts.size(); ++which) attempts.push_back(attempt(which));
    for (int64_t number = 0; number < kCalls; ++number) calls.push_back(call(number));
  }
};
const AtLoad at_load;  // a constructor: it runs before dlopen() returns

int64_t act(int64_t action, int64_t which) {
  switch (action) {
    case attack_at_load:
      return at_load.attempts.at(static_cast<std::size_t>(which));
    case attack_now:
      return attempt(static_cast<std::size_t>(which));
    case call_at_load:
      return at_load.calls.at(static_cast<std::size_t>(which));
    case call_now:
      return call(which);
  }
  return 3 * which + 1;
}

int64_t results[1024];

}  // namespace

EXPORT AOTInductorModelContainerRunSingleThreaded(void*, Tensor* inputs, size_t, Tensor* outputs, size_t, void*,
                                                  void*) {
  void* data = nullptr;
  int64_t* sizes = nullptr;
  aoti_torch_get_data_ptr(inputs[0], &data);
  aoti_torch_get_sizes(inputs[0], &sizes);
  const int64_t rows = sizes[0], shape[] = {rows, 1}, strides[] = {1, 1};
  const auto* x = static_cast<const int64_t*>(data);
  for (int64_t row = 0; row < rows; ++row) results[row] = act(x[2 * row], x[2 * row + 1]);
  aoti_torch_delete_tensor_object(inputs[0]);
  return aoti_torch_create_tensor_from_blob(results, 2, shape, strides, 0, aoti_torch_dtype_int64(), 0, 0, outputs);
}

EXPORT AOTInductorGetLastError(const char** text) {
  *text = "";
  return 0;
}
