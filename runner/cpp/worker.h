// The worker role: verifies and maps the bundle, loads libtorch and the variants, warms, replays golden cases, then
// runs the slots of its arena until it is told to stop or the front is gone. Started by the front (supervisor.cc).
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

namespace mctl {

// Written to `wake_fd`: end after the slot that is running.
constexpr std::uint64_t kStopWorker = std::uint64_t{1} << 32;

struct WorkerOptions {
  int bundle_fd = -1;  // the bundle, opened by the front: a renamed file stays the same one
  int arena_fd = -1;
  int wake_fd = -1;      // eventfd: front -> worker
  int done_fd = -1;      // eventfd: worker -> front; written on every change of phase and every finished slot
  std::string libtorch;  // folder that holds libtorch_cpu.so, or the file itself
  int threads = 1;       // OpenMP threads of the model
  bool verify = true;    // digests of weights and golden cases (code is always hashed)
  pid_t front = 0;       // the front's process: the worker does not outlive it; 0: not looked at
};

// Returns the exit code: 0 after a stop. What goes wrong is told through the arena (Phase::failed). SIGINT and SIGTERM
// are ignored, so that a terminal's Ctrl-C reaches the front alone.
int run_worker(const WorkerOptions& options);

}  // namespace mctl
