#include "serve.h"

#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <boost/asio/io_context.hpp>
#include <boost/asio/signal_set.hpp>
#include <boost/asio/steady_timer.hpp>
#include <cerrno>
#include <cstring>
#include <optional>
#include <thread>

#include "doors/line_writer.h"
#include "doors/router.h"
#include "doors/server.h"
#include "doors/token.h"
#include "engine/batcher.h"
#include "engine/metrics.h"
#include "engine/packing.h"
#include "format/archive.h"
#include "format/lookup.h"
#include "format/manifest.h"
#include "model/host.h"
#include "model/host_library.h"
#include "pool/sandbox.h"
#include "pool/supervisor.h"

namespace mctl {
namespace {

using namespace std::chrono_literals;
namespace asio = boost::asio;
using Say = std::function<void(const std::string&)>;

constexpr int kSecondSignal = 130;
constexpr std::size_t kMinHeld = 256 << 20;  // bytes of large requests that are always allowed

struct File {
  int fd = -1;
  ~File() {
    if (fd >= 0) ::close(fd);
  }
};

Error usage(std::string text) { return {Code::usage, std::move(text)}; }

// Of a worker: its share of the cores, but no more than made this model faster.
std::int64_t threads_of(const ServeOptions& options, const Manifest& manifest) {
  if (options.threads) return *options.threads;
  const std::int64_t cores = std::max(1u, std::thread::hardware_concurrency());
  const std::int64_t share = std::max<std::int64_t>(1, cores / options.instances);
  const std::int64_t best = manifest.tuning ? manifest.tuning->threads : 0;
  return best > 0 ? std::min(best, share) : share;
}

// What the options leave open follows from the bundle.
Result<BatchSettings> batch_settings(const ServeOptions& options, const Manifest& manifest, const Lookup& lookup,
                                     const Packing& packing) {
  BatchSettings settings;
  settings.max_queue_delay_us = options.max_queue_delay_us;
  settings.default_timeout_us = options.default_timeout_ms * 1000;
  if (options.latency_target_ms) settings.latency_target_us = *options.latency_target_ms * 1000;
  settings.percentile = options.percentile.value_or(settings.percentile);
  if (options.percentile && !options.latency_target_ms) return usage("`--percentile` is that of `--latency-target-ms`");
  if (settings.latency_target_us && *settings.latency_target_us <= settings.max_queue_delay_us) {
    return usage("`--latency-target-ms` is not longer than `--max-queue-delay-us`: no request could keep it");
  }
  if (const auto batch = packing.batch_dim()) {
    const Dim& dim = manifest.contract.dims[*batch];
    const auto buckets = manifest.buckets.find(dim.name);
    if (buckets != manifest.buckets.end()) {
      settings.allowed_batch_sizes = buckets->second;
      settings.unpadded_sizes = lookup.unpadded(*batch);
    }
    if (options.allowed_batch_sizes) {
      settings.allowed_batch_sizes = *options.allowed_batch_sizes;
      settings.unpadded_sizes.clear();
    }
    settings.max_batch_size = options.max_batch_size.value_or(dim.max);
    const auto fits = [&](std::int64_t size) { return size >= dim.min && size <= dim.max && size % dim.multiple == 0; };
    const std::string allowed = ", the contract allows " + dim.name + " " + std::to_string(dim.min) + ".." +
                                std::to_string(dim.max) + " in steps of " + std::to_string(dim.multiple);
    if (!fits(settings.max_batch_size)) {
      return usage("`--max-batch-size` is " + std::to_string(settings.max_batch_size) + allowed);
    }
    for (const std::int64_t size : settings.allowed_batch_sizes) {
      if (!fits(size)) return usage("`--allowed-batch-sizes` has " + std::to_string(size) + allowed);
    }
  } else if (options.max_batch_size.value_or(1) != 1 || options.allowed_batch_sizes) {
    return usage("this model is not batched: it runs one request at a time");
  }
  settings.max_queue_size = options.max_queue_size.value_or(4 * settings.max_batch_size * options.instances);
  return settings;
}

HttpLimits http_limits(const ServeOptions& options) {
  HttpLimits limits;
  limits.max_body = static_cast<std::size_t>(options.max_body_mb) << 20;
  limits.max_header = static_cast<std::size_t>(options.max_header_kb) << 10;
  limits.max_connections = static_cast<std::size_t>(options.max_connections);
  limits.idle = std::chrono::seconds(options.idle_timeout);
  const auto memory =
      static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  limits.max_held = std::max({memory / 4, kMinHeld, 2 * limits.max_body});
  return limits;
}

WorkerSettings worker_settings(const ServeOptions& options, const Manifest& manifest, int bundle_fd,
                               std::optional<std::int64_t> max_rows) {
  WorkerSettings settings;
  settings.instances = static_cast<std::size_t>(options.instances);
  settings.bundle_fd = bundle_fd;
  settings.libtorch = options.libtorch;  // none for a standalone bundle, which needs none
  if (settings.libtorch.empty() && !manifest.standalone) {
    const char* path = std::getenv("MCTL_LIBTORCH");
    settings.libtorch = path != nullptr ? path : HostLibrary::libtorch_beside();
  }
  settings.verify = options.verify;
  settings.sandbox = options.sandbox;
  settings.quick = options.start == Start::quick;
  settings.max_rows = max_rows;
  settings.threads = threads_of(options, manifest);
  return settings;
}

// What is open beside connections, with room for those that are turned away and for a worker that starts again.
std::int64_t descriptors_of_its_own(const ServeOptions& options) { return 96 + 8 * options.instances; }

// As many connections at a time as there are descriptors for.
Result<std::int64_t> connections_allowed(const ServeOptions& options) {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return options.max_connections;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
  const auto most = static_cast<std::int64_t>(std::min<rlim_t>(limit.rlim_max, INT32_MAX));
  const std::int64_t own = descriptors_of_its_own(options);
  if (most <= own)
    return Error{Code::host, "only " + std::to_string(most) + " descriptors may be open, more than " +
                                 std::to_string(own) + " are needed: raise the limit (`ulimit -n`)"};
  return std::min(options.max_connections, most - own);
}

// The bundle's measured curve, with the threads that a worker has.
std::vector<std::pair<DimSizes, std::int64_t>> curve_of(const Manifest& manifest, std::int64_t threads) {
  std::vector<std::pair<DimSizes, std::int64_t>> costs;
  for (const Measured& point : manifest.curve) {
    DimSizes sizes;
    for (const Dim& dim : manifest.contract.dims) sizes.push_back(point.dims.at(dim.name));
    if (point.threads == threads) costs.emplace_back(std::move(sizes), point.median_us);
  }
  return costs;
}

bool is_loopback(const std::string& url) { return url.starts_with("http://127.") || url.starts_with("http://[::1]"); }

// A client that has just had an answer may be sending its next request: it gets one too, and is told to go.
constexpr int kQuietPolls = 10;

// All parts of the front, and the order in which they come and go.
class Front {
 public:
  Front(const ServeOptions& options, const Manifest& manifest, const Lookup& lookup, int bundle_fd, Packing& packing,
        BatchSettings batching, Token token, const Say& say);
  Result<int> run();

 private:
  Status start_workers();
  void await_signal();
  void drain();
  void poll_drained();
  void end(Result<int> result);

  void say_who_can_use_it() const;

  const ServeOptions& options_;
  const Manifest& manifest_;
  const Token token_;
  const Say& say_;
  asio::io_context io_{1};
  asio::signal_set signals_{io_, SIGTERM, SIGINT};
  asio::steady_timer timer_{io_};
  std::chrono::steady_clock::time_point exit_at_;
  Metrics metrics_;
  std::optional<Supervisor> supervisor_;
  std::optional<Batcher> batcher_;
  std::optional<Router> router_;
  std::optional<Server> server_;
  bool draining_ = false, was_ready_ = false;
  int quiet_polls_ = 0;
  Result<int> result_ = 0;
};

Front::Front(const ServeOptions& options, const Manifest& manifest, const Lookup& lookup, int bundle_fd,
             Packing& packing, BatchSettings batching, Token token, const Say& say)
    : options_(options), manifest_(manifest), token_(std::move(token)), say_(say), metrics_(manifest) {
  RouterSettings settings;
  settings.max_request_rows = options.max_request_rows.value_or(batching.max_queue_size);
  settings.default_timeout = std::chrono::milliseconds(options.default_timeout_ms);
  settings.max_body = static_cast<std::size_t>(options.max_body_mb) << 20;
  settings.token = token_.text;
  if (options.log_requests) settings.log = say;
  if (!options.null) {
    std::optional<std::int64_t> most;
    if (packing.batch_dim()) most = batching.padded(batching.limit());
    const WorkerSettings workers = worker_settings(options, manifest, bundle_fd, most);
    supervisor_.emplace(io_, manifest, workers, metrics_);
    batcher_.emplace(io_, manifest, lookup, packing, std::move(batching), std::chrono::seconds(options.worker_timeout),
                     *supervisor_, metrics_);
    batcher_->seed(curve_of(manifest, workers.threads));
  }
  router_.emplace(manifest, std::move(settings), packing, metrics_, supervisor_ ? &*supervisor_ : nullptr,
                  batcher_ ? &*batcher_ : nullptr);
  server_.emplace(io_, http_limits(options), *router_);
}

Result<int> Front::run() {
  if (auto listening = server_->listen(options_.host, static_cast<std::uint16_t>(options_.port)); !listening) {
    return listening.error();
  }
  router_->set_url(server_->url());
  say_("listening on " + server_->url());
  say_who_can_use_it();
  await_signal();
  // Where that fails it fails in the workers too, and they tell.
  if (options_.sandbox) static_cast<void>(static_cast<bool>(confine(Role::front)));
  if (auto started = start_workers(); !started) return started.error();
  io_.run();
  return result_;
}

void Front::say_who_can_use_it() const {
  const bool loopback = is_loopback(server_->url());
  if (!loopback && token_.text.empty()) say_("warning: everyone who can reach this address can use the server");
  if (!loopback && !token_.text.empty()) {
    say_("warning: this address is protected by a token, but not encrypted: put TLS in front of it");
  }
  if (token_.exposed) say_("warning: everyone on this machine can read `" + options_.token_file + "`");
}

Status Front::start_workers() {
  if (!supervisor_) return Done{};
  Supervisor::Events events;
  events.rang = [this](std::size_t worker) { batcher_->rang(worker); };
  events.died = [this](std::size_t worker) { batcher_->died(worker); };
  events.changed = [this] {
    batcher_->changed();
    if (!was_ready_ && supervisor_->ready()) say_("ready: " + manifest_.name + ", version " + manifest_.version);
    was_ready_ = was_ready_ || supervisor_->ready();
  };
  events.noted = say_;
  events.hopeless = [this](const Error& error) { end(error); };
  return supervisor_->start(std::move(events));
}

void Front::await_signal() {
  signals_.async_wait([this](boost::system::error_code ec, int) {
    if (ec) return;
    if (draining_) return end(kSecondSignal);
    drain();
    await_signal();
  });
}

void Front::drain() {
  draining_ = true;
  say_("draining");
  exit_at_ = std::chrono::steady_clock::now() + std::chrono::seconds(options_.exit_timeout);
  router_->drain();
  server_->drain();
  if (batcher_) batcher_->drain();
  poll_drained();
}

void Front::poll_drained() {
  const bool quiet = (!batcher_ || batcher_->idle()) && server_->quiet();
  quiet_polls_ = quiet ? quiet_polls_ + 1 : 0;
  if (quiet_polls_ == kQuietPolls) return end(0);
  if (std::chrono::steady_clock::now() >= exit_at_) {
    return end(Error{Code::unavailable, "requests were not answered within `--exit-timeout`"});
  }
  timer_.expires_after(5ms);
  timer_.async_wait([this](boost::system::error_code ec) {
    if (!ec) poll_drained();
  });
}

void Front::end(Result<int> result) {
  result_ = std::move(result);
  io_.stop();
}

}  // namespace

Result<int> serve(const ServeOptions& given, const Say& say) {
  signal(SIGPIPE, SIG_IGN);
  signal(SIGXFSZ, SIG_IGN);
  ServeOptions options = given;
  if (access("/proc/self/exe", R_OK) != 0) return Error{Code::host, "`/proc` is not there: mount it"};
  const auto connections = connections_allowed(options);
  if (!connections) return connections.error();
  if (*connections < options.max_connections) {
    options.max_connections = *connections;
    say("warning: at most " + std::to_string(*connections) + " connections at a time, by the limit of descriptors");
  }
  const File file{open_to_read(options.bundle)};
  if (file.fd < 0) return Error{Code::damaged, "cannot open `" + options.bundle + "`: " + std::strerror(errno)};
  const auto archive = Archive::open(file.fd);
  if (!archive) return Error{Code::damaged, "`" + options.bundle + "`: " + archive.error().text};
  const auto manifest = read_manifest(*archive);
  if (!manifest) return Error{Code::damaged, "`" + options.bundle + "`: " + manifest.error().text};
  if (auto fits = check_host(*manifest, this_host()); !options.null && !fits) return fits.error();
  Packing packing(*manifest);
  const Lookup lookup(*manifest, threads_of(options, *manifest));
  auto batching = batch_settings(options, *manifest, lookup, packing);
  if (!batching) return batching.error();
  Result<Token> token = Token{};
  if (!options.token_file.empty()) token = read_token(options.token_file);
  if (!token) return token.error();
  std::optional<LineWriter> log;
  Say say_all = say;
  if (options.log_requests) {  // so much is said that whoever reads it may be too slow
    log.emplace(STDERR_FILENO);
    say_all = [&](const std::string& line) { log->write(line); };
  }
  return Front(options, *manifest, lookup, file.fd, packing, *std::move(batching), *std::move(token), say_all).run();
}

}  // namespace mctl
