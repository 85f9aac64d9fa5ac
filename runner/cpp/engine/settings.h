// What each model of a server may have otherwise than the others. The names are those of `mctl serve`'s options.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace mctl {

enum class Start { full, quick };  // WorkerOptions::quick says what is left out

struct ModelSettings {
  std::int64_t instances = 1;
  std::optional<std::int64_t> threads;         // cores / instances
  std::optional<std::int64_t> max_batch_size;  // rows; the contract's maximum
  std::int64_t max_queue_delay_us = 0;
  std::optional<std::vector<std::int64_t>> allowed_batch_sizes;  // the bundle's buckets
  std::optional<std::int64_t> max_queue_size;                    // rows; 4 x max_batch_size x instances, at least 256
  std::int64_t default_timeout_ms = 30'000;
  std::optional<std::int64_t> latency_target_ms;  // none: batches as large as max_batch_size
  std::optional<std::int64_t> percentile;         // of requests that keep the target; 99
  std::optional<std::int64_t> max_request_rows;   // max_queue_size
  std::int64_t worker_timeout = 60;               // seconds
  Start start = Start::full;
  bool replicate_state = false;  // each instance of a model with state keeps its own
};

class Spawner;

// Handlers and how they are run: the same for all models of a server.
struct HandlerRuntime {
  std::vector<std::string> handlers;  // each `[MODEL=]FILE` or `[MODEL=]stock:NAME`
  bool allow_handler = false;         // Python code that bundles bring
  std::string handler_python = "python3";
  std::int64_t handler_processes = 1;        // of each model
  std::int64_t handler_concurrency = 64;     // requests in each process
  std::int64_t handler_timeout = 60;         // seconds
  std::size_t handler_most_body = 64 << 20;  // bytes of an answer, or of a call's tensors
  Spawner* spawner = nullptr;                // none: no handler can be started

  // What is given for a model; empty: nothing.
  std::string handler_of(std::string_view model) const;
};

// How worker processes are run: the same for all models of a server.
struct Runtime : HandlerRuntime {
  std::string libtorch;  // as HostLibrary::load takes it; empty: $MCTL_LIBTORCH, else beside the binary
  bool verify = true, sandbox = true;
  bool strict = false, debuggable = false;  // as WorkerOptions has them
  bool copy_bundle = false;                 // to memory that nobody can change, instead of mapping the file
};

// The model that an item of HandlerRuntime::handlers names, empty: any; and its handler.
std::pair<std::string_view, std::string_view> split_handler(std::string_view text);

}  // namespace mctl
