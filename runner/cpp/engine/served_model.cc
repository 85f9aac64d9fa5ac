#include "engine/served_model.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "format/archive.h"
#include "format/bundle_file.h"
#include "model/host.h"
#include "model/host_library.h"

namespace mctl {
namespace {

namespace asio = boost::asio;

constexpr std::int64_t kLeastQueue = 256;  // rows that a queue holds by default: a dozen clients never fill it

constexpr const char* kPartedNote =
    "note: the model's processes end while they run requests: each runs alone until none ended for 30 s";

Error usage(std::string text) { return {Code::usage, std::move(text)}; }

// Of a worker: its share of the cores, but no more than made this model faster.
std::int64_t threads_of(const ModelSettings& settings, const Manifest& manifest) {
  if (settings.threads) return *settings.threads;
  const std::int64_t cores = std::max(1u, std::thread::hardware_concurrency());
  const std::int64_t share = std::max<std::int64_t>(1, cores / settings.instances);
  const std::int64_t best = manifest.tuning ? manifest.tuning->threads : 0;
  return best > 0 ? std::min(best, share) : share;
}

WorkerSettings worker_settings(const ModelSettings& settings, const Runtime& runtime, const Manifest& manifest) {
  WorkerSettings workers;
  workers.instances = static_cast<std::size_t>(settings.instances);
  workers.libtorch = runtime.libtorch;  // none for a standalone bundle, which needs none
  if (workers.libtorch.empty() && !manifest.standalone) {
    const char* path = std::getenv("MCTL_LIBTORCH");
    workers.libtorch = path != nullptr ? path : HostLibrary::libtorch_beside();
  }
  workers.verify = runtime.verify;
  workers.sandbox = runtime.sandbox;
  workers.strict = runtime.strict;
  workers.debuggable = runtime.debuggable;
  workers.quick = settings.start == Start::quick;
  return workers;
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

// The sizes that the settings name have to be sizes of the batch dim.
Status check_sizes(const BatchSettings& settings, const Dim& dim) {
  const auto fits = [&](std::int64_t size) { return size >= dim.min && size <= dim.max && size % dim.multiple == 0; };
  const std::string allowed = ", the contract allows " + dim.name + " " + std::to_string(dim.min) + ".." +
                              std::to_string(dim.max) + " in steps of " + std::to_string(dim.multiple);
  if (!fits(settings.max_batch_size)) {
    return usage("`--max-batch-size` is " + std::to_string(settings.max_batch_size) + allowed);
  }
  for (const std::int64_t size : settings.allowed_batch_sizes) {
    if (!fits(size)) return usage("`--allowed-batch-sizes` has " + std::to_string(size) + allowed);
  }
  return Done{};
}

Status set_target(BatchSettings& batching, const ModelSettings& settings) {
  if (settings.latency_target_ms) batching.latency_target_us = *settings.latency_target_ms * 1000;
  batching.percentile = settings.percentile.value_or(batching.percentile);
  if (settings.percentile && !settings.latency_target_ms) {
    return usage("`--percentile` is that of `--latency-target-ms`");
  }
  if (batching.latency_target_us && *batching.latency_target_us <= batching.max_queue_delay_us) {
    return usage("`--latency-target-ms` is not longer than `--max-queue-delay-us`: no request could keep it");
  }
  return Done{};
}

}  // namespace

Result<std::shared_ptr<ServedModel>> ServedModel::open(asio::io_context& io, Reaper& reaper, const ModelSource& source,
                                                       const ModelSettings& settings, const Runtime& runtime,
                                                       bool null) {
  Descriptor file(open_to_read(source.path));
  if (!file) return Error{Code::damaged, "cannot open `" + source.path + "`: " + std::strerror(errno)};
  if (runtime.copy_bundle) {
    auto copy = sealed_copy(file.get());
    if (!copy) return copy.error();
    file = *std::move(copy);
  }
  const auto archive = Archive::open(file.get());
  if (!archive) return Error{Code::damaged, "`" + source.path + "`: " + archive.error().text};
  auto manifest = read_manifest(*archive);
  if (!manifest) return Error{Code::damaged, "`" + source.path + "`: " + manifest.error().text};
  if (auto fits = check_host(*manifest, this_host()); !null && !fits) return fits.error();
  const std::int64_t threads = threads_of(settings, *manifest);
  std::shared_ptr<ServedModel> model(new ServedModel(std::move(file), *std::move(manifest), source, threads));
  if (auto planned = model->plan(settings); !planned) return planned.error();
  if (!null) model->staff(io, reaper, settings, runtime);
  if (auto added = model->add_handler(io, source, runtime, *archive); !added) return added.error();
  return model;
}

ServedModel::ServedModel(Descriptor bundle, Manifest manifest, const ModelSource& source, std::int64_t threads)
    : bundle_(std::move(bundle)),
      manifest_(std::move(manifest)),
      name_(source.name.empty() ? manifest_.name : source.name),
      version_(source.version.empty() ? manifest_.version : source.version),
      threads_(threads),
      lookup_(manifest_, threads_),
      packing_(manifest_) {}

// What the settings leave open follows from the bundle.
Status ServedModel::plan(const ModelSettings& settings) {
  if (settings.instances > 1 && !contract().state.empty() && !settings.replicate_state) {
    return usage("the model keeps state between calls (`" + contract().state[0].name + "`), and each of " +
                 std::to_string(settings.instances) +
                 " instances would keep its own: serve one, or write `--replicate-state` if that is meant");
  }
  batching_.max_queue_delay_us = settings.max_queue_delay_us;
  batching_.default_timeout_us = settings.default_timeout_ms * 1000;
  if (auto set = set_target(batching_, settings); !set) return set;
  if (const auto batch = packing_.batch_dim()) {
    const Dim& dim = contract().dims[*batch];
    const auto buckets = manifest_.buckets.find(dim.name);
    if (settings.allowed_batch_sizes) {
      batching_.allowed_batch_sizes = *settings.allowed_batch_sizes;
    } else if (buckets != manifest_.buckets.end()) {
      batching_.allowed_batch_sizes = buckets->second;
      batching_.unpadded_sizes = lookup_.unpadded(*batch);
    }
    batching_.max_batch_size = settings.max_batch_size.value_or(dim.max);
    if (auto sound = check_sizes(batching_, dim); !sound) return sound;
  } else if (settings.max_batch_size.value_or(1) != 1 || settings.allowed_batch_sizes) {
    return usage("this model is not batched: it runs one request at a time");
  }
  const std::int64_t full = 4 * batching_.max_batch_size * settings.instances;
  batching_.max_queue_size = settings.max_queue_size.value_or(std::max(kLeastQueue, full));
  max_request_rows_ = settings.max_request_rows.value_or(batching_.max_queue_size);
  return Done{};
}

void ServedModel::staff(asio::io_context& io, Reaper& reaper, const ModelSettings& settings, const Runtime& runtime) {
  WorkerSettings workers = worker_settings(settings, runtime, manifest_);
  workers.bundle_fd = bundle_.get();
  workers.threads = threads_;
  if (packing_.batch_dim()) workers.max_rows = batching_.padded(batching_.limit());
  pool_.emplace(io, reaper, manifest_, std::move(workers));
  batcher_.emplace(io, manifest_, lookup_, packing_, batching_, std::chrono::seconds(settings.worker_timeout), *pool_,
                   metrics_);
  batcher_->seed(curve_of(manifest_, threads_));
}

// A handler that is given takes the place of the bundle's own.
Status ServedModel::add_handler(asio::io_context& io, const ModelSource& source, const HandlerRuntime& runtime,
                                const Archive& archive) {
  HandlerSettings settings;
  settings.handler = runtime.handler_of(name_);
  const bool brings_one = manifest_.handler && (manifest_.handler->is_stock() || runtime.allow_handler);
  if (settings.handler.empty() && brings_one) settings.handler = "bundle";
  if (settings.handler.empty()) return Done{};
  if (runtime.spawner == nullptr) {
    return Error{Code::usage, "model '" + name_ + "' has a handler: start the server with `--allow-handler`"};
  }
  settings.command = {runtime.handler_python, "-m", "mctl.handlers.process"};
  settings.processes = runtime.handler_processes;
  settings.concurrency = runtime.handler_concurrency;
  settings.timeout_s = runtime.handler_timeout;
  settings.most_body = runtime.handler_most_body;
  const auto contract = contract_text(archive);
  if (!contract) return contract.error();
  HandlerInit init;
  init.name = name_;
  init.version = version_;
  init.bundle = source.path;
  init.handler = settings.handler;
  init.contract = *contract;
  init.concurrency = settings.concurrency;
  handler_ = std::make_unique<ServedHandler>(io, *runtime.spawner, std::move(settings), header_of(init));
  return Done{};
}

Status ServedModel::start_handler(const Events& events) {
  if (!handler_) return Done{};
  ServedHandler::Events handler;
  handler.called = events.called;
  handler.changed = events.changed;
  handler.failed = events.failed;
  handler.noted = events.noted;
  handler.logged = [this, noted = events.noted](const std::string& line) { noted("[" + name_ + "] " + line); };
  return handler_->start(std::move(handler));
}

Status ServedModel::start(Events events) {
  if (manifest_.handler && !handler_) {
    events.noted("note: '" + name_ + "' brings a handler, which is not run: `--allow-handler` allows it");
  }
  if (auto started = start_handler(events); !started) return started;
  if (!pool_) return Done{};
  ProcessPool::Events pool;
  pool.rang = [this](std::size_t worker) { batcher_->rang(worker); };
  pool.died = [this, noted = events.noted](std::size_t worker) {
    if (batcher_->died(worker)) noted(kPartedNote);
  };
  pool.changed = [this, changed = std::move(events.changed)] {
    batcher_->changed();
    changed();
  };
  pool.noted = std::move(events.noted);
  pool.hopeless = std::move(events.failed);
  pool.loaded = [this](std::span<const double> seconds) {
    metrics_.load_seconds.assign(seconds.begin(), seconds.end());
  };
  pool.replaced = [this](const std::string& reason) { ++metrics_.restarts[reason]; };
  pool.ended = [this](double cpu_seconds) { metrics_.ended_cpu_seconds += cpu_seconds; };
  return pool_->start(std::move(pool));
}

void ServedModel::drain() {
  if (handler_) handler_->drain();
  if (batcher_) batcher_->drain();
}

// Tensors need no handler.
Status ServedModel::admit(Client client, std::int64_t rows) {
  if (!pool_) return Done{};
  if (auto why = pool_->away()) return *std::move(why);
  return batcher_->admit(client, rows);
}

Status ServedModel::submit(std::shared_ptr<Call> call) {
  if (batcher_) return batcher_->submit(std::move(call));
  answer_zeros(*call);
  return Done{};
}

bool ServedModel::cancel(Call& call) { return batcher_ && batcher_->cancel(call); }

Status ServedModel::bind(Call& call, std::span<const Given> given) const {
  std::vector<std::size_t> order;
  const auto most = packing_.batch_dim() ? std::optional(max_request_rows_) : std::nullopt;
  auto dims = check(contract(), given, order, most);
  if (!dims) return dims.error();
  call.dims = *std::move(dims);
  call.rows = packing_.rows_of(call.dims);
  for (const std::size_t index : order) call.inputs.push_back(given[index].data);
  return packing_.possible(call.dims);
}

void ServedModel::answer_zeros(Call& call) {
  std::size_t most = zeros_.size();
  for (const Tensor& output : contract().outputs) most = std::max(most, *bytes_of(output, call.dims));
  zeros_.resize(most);
  for (const Tensor& output : contract().outputs) {
    call.outputs.push_back({*shape_of(output, call.dims), std::span(zeros_).first(*bytes_of(output, call.dims))});
  }
  call.over = true;
  call.finished(nullptr);
}

Status ServedModel::ready() const {
  if (pool_ && !pool_->ready()) return Error{Code::unavailable, pool_->why_not()};
  return handler_ ? handler_->ready() : Done{};
}

bool ServedModel::takes_requests() const {
  return !(pool_ && pool_->away()) && (!handler_ || handler_->takes_requests());
}

Gauges ServedModel::gauges() {
  Gauges gauges;
  gauges.ready = static_cast<bool>(ready());
  if (!pool_) return gauges;
  gauges.queue_rows = batcher_->waiting();
  gauges.queue_capacity = batching_.max_queue_size;
  gauges.inflight = batcher_->inflight();
  gauges.limit = batcher_->limit();
  gauges.expected_wait_us = batcher_->expected_wait_us();
  gauges.workers = pool_->pids();
  for (std::size_t i = 0; i < pool_->size(); ++i) {
    ++(pool_->live(i) ? gauges.live_workers : gauges.starting_workers);
  }
  return gauges;
}

}  // namespace mctl
