// One version of one model while it is served: its bundle, contract, queue, batcher, workers, numbers and life.
//
// Calls hold it, so that it stays until the last one is answered. Without workers (`null`) it answers zeros of the
// right shape: that measures the server alone.
#pragma once

#include <boost/asio/io_context.hpp>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/batcher.h"
#include "engine/call.h"
#include "engine/metrics.h"
#include "engine/packing.h"
#include "engine/served_handler.h"
#include "engine/settings.h"
#include "format/archive.h"
#include "format/descriptor.h"
#include "format/lookup.h"
#include "format/manifest.h"
#include "format/result.h"
#include "pool/process_pool.h"
#include "pool/reaper.h"

namespace mctl {

// What is served under which name.
struct ModelSource {
  std::string path;
  std::string name = {}, version = {};  // empty: the manifest's
};

class ServedModel : public std::enable_shared_from_this<ServedModel> {
 public:
  struct Events {
    std::function<void()> changed;                  // ready, or not
    std::function<void(const Error&)> failed;       // no worker can start; before the first was ready
    std::function<void(const std::string&)> noted;  // for the operator
    // What ServedHandler::Events::called is, of its handler.
    std::function<ServedHandler::Cancel(const CallOrigin&, HandlerCall& call, const Caller& caller)> called = {};
  };

  // Reads the bundle and decides what the settings leave open. Code::damaged, Code::host or Code::usage with the
  // reason.
  static Result<std::shared_ptr<ServedModel>> open(boost::asio::io_context& io, Reaper& reaper,
                                                   const ModelSource& source, const ModelSettings& settings,
                                                   const Runtime& runtime, bool null = false);

  Status start(Events events);
  void drain();

  // Code::unavailable if a client's `rows` more find no room: can be asked before a request is read.
  Status admit(Client client, std::int64_t rows);
  Status submit(std::shared_ptr<Call> call);
  bool cancel(Call& call);  // false if it runs already, and will be finished

  // Holds tensors to the contract: the call gets its sizes, rows and inputs. Code::invalid says what does not fit.
  Status bind(Call& call, std::span<const Given> given) const;

  ServedHandler* handler() const { return handler_.get(); }  // nullptr: it has none

  const std::string& name() const { return name_; }
  const std::string& version() const { return version_; }
  const Manifest& manifest() const { return manifest_; }
  const Contract& contract() const { return manifest_.contract; }
  std::int64_t max_request_rows() const { return max_request_rows_; }
  std::int64_t default_timeout_ns() const { return batching_.default_timeout_us * 1000; }
  Metrics& metrics() { return metrics_; }
  const Metrics& metrics() const { return metrics_; }
  Gauges gauges();

  Status ready() const;  // Code::unavailable with what it waits for
  // It is ready, or its processes are on their way back: requests wait for them.
  bool takes_requests() const;
  bool idle() const { return (!batcher_ || batcher_->idle()) && (!handler_ || handler_->idle()); }

 private:
  ServedModel(Descriptor bundle, Manifest manifest, const ModelSource& source, std::int64_t threads);
  Status plan(const ModelSettings& settings);
  void staff(boost::asio::io_context& io, Reaper& reaper, const ModelSettings& settings, const Runtime& runtime);
  Status add_handler(boost::asio::io_context& io, const ModelSource& source, const HandlerRuntime& runtime,
                     const Archive& archive);
  Status start_handler(const Events& events);
  void answer_zeros(Call& call);

  const Descriptor bundle_;
  const Manifest manifest_;
  const std::string name_, version_;
  const std::int64_t threads_;  // of a worker
  const Lookup lookup_;
  Packing packing_;
  BatchSettings batching_;
  std::int64_t max_request_rows_ = 1;
  Metrics metrics_;
  std::optional<ProcessPool> pool_;
  std::optional<Batcher> batcher_;
  std::unique_ptr<ServedHandler> handler_;
  std::vector<std::byte> zeros_;
};

}  // namespace mctl
