// The options of `mctl-runner serve` and what they are when they are not given.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "format/result.h"

namespace mctl {

enum class Start { full, quick };  // WorkerOptions::quick says what is left out

struct ServeOptions {
  std::string bundle, libtorch, token_file;
  std::string host = "127.0.0.1";
  std::int64_t port = 8000;
  std::int64_t instances = 1;
  std::optional<std::int64_t> threads;         // cores / instances
  std::optional<std::int64_t> max_batch_size;  // rows; the contract's maximum
  std::int64_t max_queue_delay_us = 0;
  std::optional<std::vector<std::int64_t>> allowed_batch_sizes;  // the bundle's buckets
  std::optional<std::int64_t> max_queue_size;                    // rows; 4 x max_batch_size x instances
  std::int64_t default_timeout_ms = 30'000;
  std::optional<std::int64_t> latency_target_ms;  // none: batches as large as max_batch_size
  std::optional<std::int64_t> percentile;         // of requests that keep the target; 99
  std::optional<std::int64_t> max_request_rows;   // max_queue_size
  std::int64_t max_body_mb = 64, max_header_kb = 64;
  std::int64_t max_connections = 1024;
  std::int64_t idle_timeout = 60, exit_timeout = 30, worker_timeout = 60;  // seconds
  Start start = Start::full;
  bool verify = true, sandbox = true, null = false, log_requests = false;
};

// The words after `serve`. Code::usage names the option and what it takes.
Result<ServeOptions> parse_serve_options(std::span<const std::string> words);

std::string serve_help();

}  // namespace mctl
