#include "options.h"

#include <charconv>
#include <limits>
#include <string_view>
#include <variant>

namespace mctl {
namespace {

constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();

using Target =
    std::variant<std::string ServeOptions::*, std::int64_t ServeOptions::*, std::optional<std::int64_t> ServeOptions::*,
                 std::optional<std::vector<std::int64_t>> ServeOptions::*, bool ServeOptions::*, Start ServeOptions::*,
                 std::vector<std::string> ServeOptions::*>;

struct Option {
  std::string_view name, takes;  // takes: for a person; empty for a flag; `no|yes` for a choice, by any two words
  Target target;
  std::int64_t least, most;  // of a number, or what a flag sets
  std::string_view help;
};

const Option kOptions[] = {
    {"--host", "ADDRESS", &ServeOptions::host, 0, 0, "address to listen on [127.0.0.1]"},
    {"--port", "PORT", &ServeOptions::port, 0, 65535, "0: a free one, told on stderr [8000]"},
    {"--token-file", "FILE", &ServeOptions::token_file, 0, 0, "its first line is what clients have to send [no token]"},
    {"--allowed-hosts", "NAME,NAME,...", &ServeOptions::allowed_hosts, 0, 0,
     "names of this server in requests, `*`: any [its own on loopback without a token, else any]"},
    {"--config", "FILE", &ServeOptions::config_file, 0, 0, "models, versions and traffic; read again on SIGHUP"},
    {"--state", "FILE", &ServeOptions::state_file, 0, 0, "what was changed is kept there, over any end of the server"},
    {"--ready", "all|any", &ServeOptions::ready, 0, 0, "models that have to be ready for the server to be [any]"},
    {"--admin-port", "PORT", &ServeOptions::admin_port, 0, 65535, "for management; 0: a free one [no management]"},
    {"--admin-host", "ADDRESS", &ServeOptions::admin_host, 0, 0, "address of that [127.0.0.1]"},
    {"--admin-token-file", "FILE", &ServeOptions::admin_token_file, 0, 0, "what operators have to send [no token]"},
    {"--model-store", "FOLDER", &ServeOptions::model_store, 0, 0, "of the bundles that operators may load [none]"},
    {"--store", "FOLDER", &ServeOptions::store, 0, 0, "keeps bundles that come in load requests [they are refused]"},
    {"--max-load-mb", "MIB", &ServeOptions::max_load_mb, 1, 65536, "of a load request with a bundle in it [1024]"},
    {"--max-resident", "N", &ServeOptions::max_resident, 1, 1'000'000,
     "models in memory; those on demand go for others [what fits]"},
    {"--libtorch", "PATH", &ServeOptions::libtorch, 0, 0,
     "libtorch_cpu.so or its folder [$MCTL_LIBTORCH, else beside]"},
    {"--instances", "N", &ServeOptions::instances, 1, 256, "worker processes [1]"},
    {"--replicate-state", "", &ServeOptions::replicate_state, 1, 1, "each instance keeps the model's state for itself"},
    {"--threads", "N", &ServeOptions::threads, 1, 1024, "OpenMP threads of a worker [cores / instances]"},
    {"--max-batch-size", "ROWS", &ServeOptions::max_batch_size, 1, kMost, "[the contract's maximum]"},
    {"--max-queue-delay-us", "US", &ServeOptions::max_queue_delay_us, 0, kMost, "wait for company [0]"},
    {"--allowed-batch-sizes", "V,V,...", &ServeOptions::allowed_batch_sizes, 1, kMost, "[the bundle's buckets]"},
    {"--max-queue-size", "ROWS", &ServeOptions::max_queue_size, 1, kMost,
     "503 beyond [4 x batch x instances, at least 256]"},
    {"--default-timeout-ms", "MS", &ServeOptions::default_timeout_ms, 1, kMost, "a request's deadline [30000]"},
    {"--latency-target-ms", "MS", &ServeOptions::latency_target_ms, 1, kMost,
     "batch size and admission keep it [none]"},
    {"--percentile", "P", &ServeOptions::percentile, 50, 99, "percent of requests that keep the target [99]"},
    {"--max-request-rows", "ROWS", &ServeOptions::max_request_rows, 1, kMost,
     "split into batches; 400 beyond [max-queue-size]"},
    {"--max-body-mb", "MIB", &ServeOptions::max_body_mb, 1, 65536, "413 beyond, inflated too [64]"},
    {"--max-header-kb", "KIB", &ServeOptions::max_header_kb, 1, 16384, "of a request's head [64]"},
    {"--max-clients-mb", "MIB", &ServeOptions::max_clients_mb, 32, kMost,
     "that all clients may make it hold; 503 beyond [a quarter of the memory]"},
    {"--max-connections", "N", &ServeOptions::max_connections, 1, 1'000'000, "[1024]"},
    {"--idle-timeout", "S", &ServeOptions::idle_timeout, 1, kMost, "without a request, or to send one [60]"},
    {"--exit-timeout", "S", &ServeOptions::exit_timeout, 0, kMost, "for draining after SIGTERM or SIGINT [30]"},
    {"--worker-timeout", "S", &ServeOptions::worker_timeout, 1, kMost, "a batch may run; then a new worker [60]"},
    {"--start", "full|quick", &ServeOptions::start, 0, 0, "ready before all is warmed and replayed [full]"},
    {"--handler", "[MODEL=]FILE", &ServeOptions::handlers, 0, 0,
     "Python code between requests and tensors, or `stock:NAME`; may be given again [none]"},
    {"--handlers", "N", &ServeOptions::handler_processes, 1, 64, "handler processes of a model [1]"},
    {"--handler-concurrency", "N", &ServeOptions::handler_concurrency, 1, 4096, "requests in one of them [64]"},
    {"--handler-timeout", "S", &ServeOptions::handler_timeout, 1, kMost,
     "its event loop may be blocked; then a new process [60]"},
    {"--handler-python", "PATH", &ServeOptions::handler_python, 0, 0, "the Python that has mctl [python3]"},
    {"--allow-handler", "", &ServeOptions::allow_handler, 1, 1, "run Python code that a bundle brings"},
    {"--log-requests", "", &ServeOptions::log_requests, 1, 1, "one JSON line a request on stderr"},
    {"--bundle-memory", "map|copy", &ServeOptions::copy_bundle, 0, 0,
     "copy: to memory that nobody can change or reclaim [map: a changed file is noticed]"},
    {"--no-verify", "", &ServeOptions::verify, 0, 0, "skip digests of weights and golden cases"},
    {"--sandbox", "default|strict", &ServeOptions::strict, 0, 0,
     "strict: workers may do what is listed, else all but what is listed [default]"},
    {"--no-sandbox", "", &ServeOptions::sandbox, 0, 0, "workers may do all that this user may, and dump core"},
    {"--debuggable", "", &ServeOptions::debuggable, 1, 1, "this user's debuggers may look in; cores are dumped"},
    {"--null", "", &ServeOptions::null, 1, 1, "answer zeros without a model: measures the server alone"},
};

Error usage(std::string text) { return {Code::usage, std::move(text)}; }

Result<std::int64_t> number(const Option& option, std::string_view text) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || value < option.least || value > option.most) {
    return usage("`" + std::string(option.name) + "` is `" + std::string(text) + "`, allowed " +
                 std::to_string(option.least) + ".." + std::to_string(option.most));
  }
  return value;
}

Result<std::vector<std::int64_t>> numbers(const Option& option, std::string_view text) {
  std::vector<std::int64_t> values;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    const auto value = number(option, text.substr(begin, end - begin));
    if (!value) return value.error();
    if (!values.empty() && *value <= values.back()) {
      return usage("`" + std::string(option.name) + "` is not ascending: " + std::string(text));
    }
    values.push_back(*value);
    begin = end + 1;
  }
  return values;
}

// Where an option takes one of some words, `takes` has them: `all|any`.
Status check_word(const Option& option, std::string_view text) {
  const std::string words = '|' + std::string(option.takes) + '|';
  const bool known = text.find('|') == text.npos && words.find('|' + std::string(text) + '|') != words.npos;
  if (option.takes.find('|') == option.takes.npos || known) return Done{};
  return usage("`" + std::string(option.name) + "` is `" + std::string(text) + "`, allowed " +
               std::string(option.takes));
}

Status set(ServeOptions& options, const Option& option, const std::string& text) {
  if (auto known = check_word(option, text); !known) return known;
  if (const auto* member = std::get_if<std::string ServeOptions::*>(&option.target)) {
    options.*(*member) = text;
  } else if (const auto* texts = std::get_if<std::vector<std::string> ServeOptions::*>(&option.target)) {
    (options.*(*texts)).push_back(text);
  } else if (const auto* list = std::get_if<std::optional<std::vector<std::int64_t>> ServeOptions::*>(&option.target)) {
    auto values = numbers(option, text);
    if (!values) return values.error();
    options.*(*list) = *values;
  } else if (const auto* second = std::get_if<bool ServeOptions::*>(&option.target)) {
    options.*(*second) = option.takes.ends_with('|' + text);
  } else if (const auto* start = std::get_if<Start ServeOptions::*>(&option.target)) {
    options.*(*start) = text == "quick" ? Start::quick : Start::full;
  } else {
    const auto value = number(option, text);
    if (!value) return value.error();
    if (const auto* plain = std::get_if<std::int64_t ServeOptions::*>(&option.target)) options.*(*plain) = *value;
    if (const auto* maybe = std::get_if<std::optional<std::int64_t> ServeOptions::*>(&option.target)) {
      options.*(*maybe) = *value;
    }
  }
  return Done{};
}

const Option* find(std::string_view name) {
  for (const Option& option : kOptions) {
    if (option.name == name) return &option;
  }
  return nullptr;
}

// One option at words[index], which moves past it.
Status take(ServeOptions& options, std::span<const std::string> words, std::size_t& index) {
  const std::string& word = words[index++];
  const std::size_t equals = word.find('=');
  const Option* option = find(std::string_view(word).substr(0, equals));
  if (!option) return usage("no such option: `" + word + "`");
  if (const auto* flag = std::get_if<bool ServeOptions::*>(&option->target); flag != nullptr && option->takes.empty()) {
    if (equals != std::string::npos) return usage("`" + std::string(option->name) + "` takes no value");
    options.*(*flag) = option->least != 0;
    return Done{};
  }
  if (equals != std::string::npos) return set(options, *option, word.substr(equals + 1));
  if (index == words.size()) return usage("`" + word + "` needs a value: " + std::string(option->takes));
  return set(options, *option, words[index++]);
}

}  // namespace

Result<ServeOptions> parse_serve_options(std::span<const std::string> words) {
  ServeOptions options;
  for (std::size_t index = 0; index < words.size();) {
    if (words[index].starts_with("--")) {
      if (auto done = take(options, words, index); !done) return done.error();
    } else {
      options.bundles.push_back(words[index++]);
    }
  }
  if (options.bundles.empty() && options.config_file.empty() && options.state_file.empty() && !options.admin_port)
    return usage("nothing to serve: give bundles, a folder of models, `--config`, `--state` or `--admin-port`");
  if (options.strict && !options.sandbox) return usage("`--sandbox strict` and `--no-sandbox` exclude each other");
  return options;
}

std::string serve_help() {
  std::string text = "usage: mctl-runner serve BUNDLE…|FOLDER [OPTION VALUE]…\n\nServes bundles over HTTP.\n\n";
  for (const Option& option : kOptions) {
    std::string left = "  " + std::string(option.name) + " " + std::string(option.takes);
    left.resize(std::max<std::size_t>(left.size(), 32), ' ');
    text += left + " " + std::string(option.help) + "\n";
  }
  return text;
}

}  // namespace mctl
