// A library with AOTInductor's interface whose model does to its process what each row asks for.
//
// x: int64 [batch, 2], rows of (action, value). y: int64 [batch, 1], FACTOR * value + 1 for a row that only wants an
// answer, else what its action gives. faulty.py names the actions and makes a bundle of it. BEYOND is what a row does
// that only wants an answer, and whose value is above 1000: golden cases and warming up don't see it.
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "aoti_model.h"

namespace {

enum Action : int64_t { warm, answer, crash, abort_, exhaust, hang, nap, leave, fail, attempt, cost, slow };

int64_t results[4096];

void exhaust_memory(int64_t mebibytes) {
  for (int64_t taken = 0; taken < mebibytes; ++taken) {
    auto* block = static_cast<char*>(malloc(1 << 20));
    if (block == nullptr) abort();  // as an uncaught std::bad_alloc ends
    memset(block, 1, 1 << 20);
  }
}

void* nothing(void* given) { return given; }

bool starts_a_thread() {
  pthread_t thread;
  return pthread_create(&thread, nullptr, nothing, nullptr) == 0 && pthread_join(thread, nullptr) == 0;
}

// What the process tries to do; 0 if it may, else errno.
int64_t attempt_of(int64_t which) {
  char truth[] = "/bin/true";
  char* const words[] = {truth, nullptr};
  errno = 0;
  long done = 0;
  switch (which) {
    case 0:
      return starts_a_thread() ? 0 : EAGAIN;
    case 1:
      return (done = open("/proc/self/status", O_RDONLY)) >= 0 ? 0 : errno;
    case 2:
      return mmap(nullptr, 4096, PROT_READ | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) != MAP_FAILED ? 0 : errno;
    case 3:
      return raise(0) == 0 ? 0 : errno;
    case 4:
      done = execv(truth, words);
      break;
    case 5:
      done = socket(AF_INET, SOCK_STREAM, 0);
      break;
    case 6:
      done = open("/tmp/.attempt", O_WRONLY | O_CREAT | O_EXCL, 0600);
      if (done >= 0) unlink("/tmp/.attempt");
      break;
    case 7:
      if ((done = fork()) == 0) _exit(0);
      // Its end is a signal, which would stop a process that is traced, as it is from 9 on.
      if (done > 0) waitpid(static_cast<pid_t>(done), nullptr, 0);
      break;
    case 8:
      done = kill(getppid(), 0);
      break;
    case 9:
      done = ptrace(PTRACE_TRACEME, 0, nullptr, nullptr);
      break;
    case 10:
      done = unlink("/nowhere/at/all");
      break;
    case 11:
      done = syscall(SYS_process_vm_readv, getppid(), nullptr, 0, nullptr, 0, 0);
      break;
    case 12:
      done = syscall(SYS_bpf, 0, nullptr, 0);
      break;
    case 13:
      done = syscall(SYS_io_uring_setup, 1, nullptr);
      break;
    case 14:
      done = open("/dev/null", O_RDWR);
      break;
  }
  return done < 0 ? errno : 0;
}

int64_t act(int64_t action, int64_t value) {
  switch (action) {
    case crash:
      raise(SIGSEGV);
      break;
    case abort_:
      abort();
    case exhaust:
      exhaust_memory(value);
      break;
    case hang:
      for (;;) pause();
    case nap:
      usleep(static_cast<useconds_t>(value) * 1000);
      break;
    case slow:
      usleep(20'000);
      break;
    case leave:
      _exit(static_cast<int>(value));
    case attempt:
      return attempt_of(value);
  }
  return FACTOR * value + 1;
}

}  // namespace

EXPORT AOTInductorModelContainerRunSingleThreaded(void*, Tensor* inputs, size_t, Tensor* outputs, size_t, void*,
                                                  void*) {
  void* data = nullptr;
  int64_t* sizes = nullptr;
  aoti_torch_get_data_ptr(inputs[0], &data);
  aoti_torch_get_sizes(inputs[0], &sizes);
  const int64_t rows = sizes[0], shape[] = {rows, 1}, strides[] = {1, 1};
  const auto* x = static_cast<const int64_t*>(data);
  bool failed = false;
  int64_t cost_ms = 0;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t value = x[2 * row + 1];
    const int64_t action = x[2 * row] == answer && value > 1000 ? BEYOND : x[2 * row];
    failed = failed || action == fail;
    if (action == cost) cost_ms = value;
    results[row] = act(action, value);
  }
  usleep(static_cast<useconds_t>(cost_ms * (1000 + 200 * rows)));
  aoti_torch_delete_tensor_object(inputs[0]);
  if (failed) return 1;
  return aoti_torch_create_tensor_from_blob(results, 2, shape, strides, 0, aoti_torch_dtype_int64(), 0, 0, outputs);
}

EXPORT AOTInductorGetLastError(const char** text) {
  *text = "the row asked for it";
  return 0;
}
