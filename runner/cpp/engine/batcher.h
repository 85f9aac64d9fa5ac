// The engine: requests queue, the policy forms batches, workers run them, answers are cut out. One thread, no locks.
#pragma once

#include <array>
#include <boost/asio/io_context.hpp>
#include <boost/asio/steady_timer.hpp>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/call.h"
#include "engine/caution.h"
#include "engine/metrics.h"
#include "engine/pace.h"
#include "engine/packing.h"
#include "engine/policy.h"
#include "engine/shares.h"
#include "format/lookup.h"
#include "pool/guard.h"
#include "pool/pool.h"

namespace mctl {

std::int64_t now_ns();  // CLOCK_MONOTONIC

class Batcher {
 public:
  Batcher(boost::asio::io_context& io, const Manifest& manifest, const Lookup& lookup, Packing& packing,
          BatchSettings settings, std::chrono::nanoseconds worker_timeout, Pool& pool, Metrics& metrics);

  // Code::unavailable if the queue has no room for so many rows of a client: can be asked before a request is read.
  Status admit(Client client, std::int64_t rows);
  // Asks that first; Code::unavailable also if it would be answered too late.
  Status submit(std::shared_ptr<Call> call);
  // What batches of these sizes are known to take beforehand, in microseconds.
  void seed(std::span<const std::pair<DimSizes, std::int64_t>> costs);
  bool cancel(Call& call);  // takes it out of the queue; false if it runs already

  // What happens to the pool's workers.
  void rang(std::size_t worker);
  bool died(std::size_t worker);  // true: from now on requests run alone (caution.h)
  void changed();

  void drain();
  bool idle() const { return queue_.empty() && inflight_ == 0; }
  std::int64_t waiting() const { return pace_.rows(); }
  std::int64_t inflight() const { return inflight_; }
  std::int64_t limit() const { return pace_.limit(); }
  std::int64_t expected_wait_us() { return pace_.wait_us(free_after_us()); }
  const BatchSettings& settings() const { return settings_; }

 private:
  struct Batch {
    std::vector<Waiting> requests;
    DimSizes sizes;
    BatchFacts facts;
    Formed formed;
    std::string variant;
    std::int64_t filling_ns = 0;  // how long it took to write it into its slot
    std::int64_t since_ns = 0;    // since when the worker has nothing else to do
    bool done = false, begun = false;
  };
  struct Slots {
    std::array<std::optional<Batch>, kSlots> held;
    int next = 0;  // they are used in turn
    std::optional<Ran> last;
  };
  struct Place {
    std::size_t worker;
    int slot;
  };

  Status in_time(const Call& call, const std::string& key, std::size_t kind);
  std::span<std::int64_t> free_after_us();
  bool runs_first(const Slots& slots, int slot) const;
  void schedule();
  void look();
  Error full() const;
  bool make_room(std::int64_t rows);
  void enqueue(Waiting request);
  void dispatch();
  std::optional<Place> place(bool busy) const;
  void start(Place place, const Decision& decision);
  bool fill(Place place, Batch& batch);
  void note_begin(Place place, Batch& batch);
  void finish(Place place);
  void withhold(Batch batch, const Error& why);
  void refuse_waiting(const Error& why);
  void learn(Place place, const Batch& batch, std::int64_t begun_ns, std::int64_t compute_ns);
  std::vector<std::pair<DimSizes, std::int64_t>> costs_of(std::span<const std::int64_t> warm) const;
  bool answer(Place place, const Batch& batch, const Waiting& request, std::int64_t at_row);
  Status collect(Place place, const Batch& batch, const Waiting& request, std::int64_t at_row);
  void retry(Batch batch, bool blamed);
  void part();
  void end(Call& call, const Error& error);
  bool leave_queue(const Call& call);
  void expire_waiting(std::int64_t now);
  void wake_at(std::int64_t at_ns);
  void on_timer();
  bool expire_running(Place place, Batch& batch, std::int64_t now);
  void watch(std::size_t worker, std::int64_t now);

  boost::asio::io_context& io_;
  const Manifest& manifest_;
  const Lookup& lookup_;
  Packing& packing_;
  const BatchSettings settings_;
  const std::chrono::nanoseconds worker_timeout_;
  Pool& pool_;
  Metrics& metrics_;
  boost::asio::steady_timer timer_;
  std::int64_t timer_ns_ = 0;  // when it goes off; 0: it is not set
  Queue queue_;
  Shares shares_;
  Pace pace_;
  Caution caution_;
  std::int64_t inflight_ = 0;  // batches
  std::int64_t fresh_ = 0;     // rows that came since the last dispatch
  std::vector<Slots> slots_;
  std::vector<std::int64_t> free_after_us_, waits_us_;  // kept for their memory
  bool warm_ = false, scheduled_ = false, draining_ = false;
  const Guard guard_;
};

}  // namespace mctl
