// The options of `mctl-runner serve` and what they are when they are not given.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/settings.h"
#include "format/result.h"

namespace mctl {

struct ServeOptions : ModelSettings, Runtime {
  std::vector<std::string> bundles;  // or one folder
  std::string config_file, state_file;
  std::string ready = "any";  // or all
  std::optional<std::int64_t> admin_port;
  std::string admin_host = "127.0.0.1";
  std::string admin_token_file;
  std::string model_store, store;  // folders: of bundles to load, for bundles that come in requests
  std::int64_t max_load_mb = 1024;
  std::optional<std::int64_t> max_resident;  // models in memory; none: what fits
  std::string token_file;
  std::string allowed_hosts;  // on a loopback address without a token: the names that this has; otherwise any
  std::string host = "127.0.0.1";
  std::int64_t port = 8000;
  std::int64_t max_body_mb = 64, max_header_kb = 64;
  std::optional<std::int64_t> max_clients_mb;  // a quarter of the memory
  std::int64_t max_connections = 1024;
  std::int64_t idle_timeout = 60, exit_timeout = 30;  // seconds
  bool null = false, log_requests = false;
};

// The words after `serve`. Code::usage names the option and what it takes.
Result<ServeOptions> parse_serve_options(std::span<const std::string> words);

std::string serve_help();

}  // namespace mctl
