// The batching policy: a pure function of settings, limit, queue and clock. Mirrors runner/policy.py, whose docstring
// numbers the rules; tests/vectors/batching/*.json runs both. Times are integer microseconds, everything counts rows.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/shares.h"
#include "format/result.h"

namespace mctl {

struct Call;

struct BatchSettings {
  std::int64_t max_batch_size = 1;  // rows
  std::int64_t max_queue_size = 1;  // rows
  std::int64_t max_queue_delay_us = 0;
  std::vector<std::int64_t> allowed_batch_sizes;  // ascending; empty: a batch is not padded
  std::vector<std::int64_t> unpadded_sizes = {};  // of these: what they hold runs as it is
  std::int64_t default_timeout_us = 30'000'000;
  std::optional<std::int64_t> latency_target_us = std::nullopt;  // of `percentile` percent of the requests
  std::int64_t percentile = 99;

  std::int64_t limit() const;                    // the most rows that a batch may ever have, before padding
  std::int64_t bucket(std::int64_t rows) const;  // the allowed size that holds them
  std::int64_t padded(std::int64_t rows) const;
  bool admits(std::int64_t waiting, std::int64_t rows) const { return rows <= max_queue_size - waiting; }
};

// One entry of the queue: rows that stay together.
struct Waiting {
  std::int64_t arrival_us = 0, deadline_us = 0, rows = 0;
  std::string key;  // the bucket of the dims that are not the batch's
  std::shared_ptr<Call> call;
  std::int64_t first_row = 0;  // of the call's rows
  bool retried = false;        // it was in a batch whose worker died
  std::size_t kind = 0;        // Pace's number for the key's sizes
  Client client = 0;
  std::int64_t turn = 0;  // of its client
};

using Queue = std::deque<Waiting>;

enum class Reason : std::uint8_t { full, delay, idle, drain };
std::string_view name_of(Reason reason);

struct Decision {
  std::vector<std::size_t> batch;  // indices in the queue, ascending; empty: nothing starts now
  std::int64_t rows = 0;
  Reason reason = Reason::idle;
  std::optional<std::int64_t> wake_us;  // when to look again if nothing starts; nullopt: when told
};

// Puts a request into the queue: in the order of turns, then of arrival (rule 16).
void enqueue(Queue& queue, Waiting request);

// What a client has last in the queue, if anything may make room for others (rule 17): not what was run once already.
std::shared_ptr<Call> last_of(const Queue& queue, Client client);

// Takes expired requests out of the queue, in order (rule 3).
std::vector<Waiting> take_expired(Queue& queue, std::int64_t now_us);

// What to start on a free instance (rules 5 to 7). The queue holds nothing expired.
// `ahead`: no instance is free, but one has room to hold a batch: only a batch that waiting cannot improve starts.
enum class Room : std::uint8_t { none, ahead, free };
Decision decide(const BatchSettings& settings, std::int64_t limit, const Queue& queue, std::int64_t now_us, Room room,
                bool draining);

}  // namespace mctl
