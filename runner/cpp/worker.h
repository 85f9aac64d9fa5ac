// The worker role: verifies and maps the bundle, loads libtorch and the variants, warms, replays golden cases, then
// runs the slots of its arena until the front's end of the doorbell closes. Started by the front (supervisor.cc).
#pragma once

#include <string>

namespace mctl {

struct WorkerOptions {
  int bundle_fd = -1;  // the bundle, opened by the front: a renamed file stays the same one
  int arena_fd = -1;
  int wake_fd = -1;      // eventfd: front -> worker
  int done_fd = -1;      // eventfd: worker -> front; written on every change of phase and every finished slot
  std::string libtorch;  // folder that holds libtorch_cpu.so, or the file itself
  int threads = 1;       // OpenMP threads of the model
  bool verify = true;    // digests of weights and golden cases (code is always hashed)
};

// Returns the exit code. What goes wrong is told through the arena.
int run_worker(const WorkerOptions& options);

}  // namespace mctl
