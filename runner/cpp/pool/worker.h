// The worker role: verifies and maps the bundle, loads libtorch and the variants, warms, replays golden cases, then
// runs the slots of its arena until it is killed. Started by the front (process_pool.cc), which it does not outlive.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace mctl {

struct WorkerOptions {
  int bundle_fd = -1;  // the bundle, opened by the front: a renamed file stays the same one
  int arena_fd = -1;
  int wake_fd = -1;         // eventfd: front -> worker
  int done_fd = -1;         // eventfd: worker -> front; written on every change of phase and every finished slot
  std::string libtorch;     // as HostLibrary::load takes it
  int threads = 1;          // OpenMP threads of the model
  bool verify = true;       // digests of weights and golden cases (code is always hashed)
  bool replaces = false;    // one that was ready with this bundle: it replays the smallest golden case, and warms less
  bool quick = false;       // each variant replays the smallest golden case that it covers, and little is warmed
  bool sandbox = false;     // gives up what a model has no use for, before its code is loaded
  bool strict = false;      // as Confinement::strict
  bool debuggable = false;  // this user's debuggers may look into it, and it may dump core
  std::optional<std::int64_t> max_rows;        // of a batch, padding included; none: the contract's maximum
  std::vector<std::int64_t> batch_sizes = {};  // that the front pads batches to; empty: the bundle's buckets
};

// Returns the exit code once it cannot go on. What went wrong is told through the arena (Phase::failed).
int run_worker(const WorkerOptions& options);

}  // namespace mctl
