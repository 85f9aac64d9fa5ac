// What the batcher learns while it runs: costs, the limit, estimates for arrivals. Mirrors runner/pace.py, whose
// docstring numbers the rules; tests/vectors/batching/*.json runs both. Times are integer microseconds, everything
// counts rows.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/policy.h"

namespace mctl {

// Of an arrival, from now on: when its first batch would begin, and when its last one would be done.
struct Estimate {
  std::int64_t wait_us = 0, done_us = 0;
  bool too_late(std::int64_t time_us) const { return wait_us > 0 && done_us >= time_us; }  // rule 12
};

// A batch as far as the pace counts it: `era` tells between which changes of the limit it was formed.
struct Formed {
  std::size_t kind = 0;
  std::int64_t padded = 0;
  bool full = false;
  std::uint64_t era = 0;
};

struct Ran {
  Formed batch;
  std::int64_t took_us = 0;
};

struct Seed {
  std::size_t kind;
  std::int64_t padded, us;
};

class Pace {
 public:
  explicit Pace(const BatchSettings& settings);  // which have to stay

  // A number for the sizes of the dims that are not the batch's; those that come after very many share one.
  std::size_t kind(const std::string& name);
  void seed(std::span<const Seed> seeds);
  std::int64_t limit() const { return limit_; }
  std::int64_t rows() const { return rows_; }                    // that wait
  std::int64_t cost(std::size_t kind, std::int64_t rows) const;  // of a batch, after padding
  std::optional<std::int64_t> bound_us() const;                  // 7/8 of the target, if there is one

  void joined(const std::string& key, std::size_t kind, std::int64_t rows);
  void left(const std::string& key, std::int64_t rows);

  // `free_after_us`: how long each live instance still has to run; it is sorted. `first`: nothing that waits is ahead.
  Estimate estimate(const std::string& key, std::size_t kind, std::int64_t rows, std::span<std::int64_t> free_after_us,
                    bool first = false) const;
  std::int64_t wait_us(std::span<std::int64_t> free_after_us) const;  // of a batch formed after all that waits
  std::int64_t time_us(std::int64_t timeout_us, bool stated) const;   // an arrival's time (rule 12)
  void refused(std::size_t kind, bool stated);

  Formed formed(std::size_t kind, std::int64_t rows, bool full) const;
  // `ahead`: the batch that the same instance ran before.
  void finished(const Formed& batch, std::int64_t took_us, std::span<const std::int64_t> waits_us,
                const std::optional<Ran>& ahead);

 private:
  struct Kind {
    std::vector<std::pair<std::int64_t, std::int64_t>> cost8;  // by padded rows, ascending
    std::int64_t last = 0;                                     // padded rows of its last batch
  };
  struct Key {
    std::size_t kind = 0;
    std::int64_t rows = 0, work_us = 0;
  };

  void learn(const Formed& batch, std::int64_t took_us);
  void count(Key& key, std::int64_t rows);
  void reckon(Key& key);
  std::int64_t late_of(const Formed& batch, std::int64_t took_us, std::span<const std::int64_t> waits_us,
                       const std::optional<Ran>& ahead) const;
  std::int64_t spare(const Formed& batch) const;
  void record(std::int64_t requests, std::int64_t late, bool full);
  void owe(std::int64_t requests, std::int64_t late);
  void change(std::int64_t value);
  std::int64_t effective(std::int64_t value) const;

  const BatchSettings& settings_;
  std::int64_t smallest_, value_, limit_;
  std::int64_t rows_ = 0, work_us_ = 0;
  std::int64_t seen_ = 0, late_ = 0, full_ = 0, owed_ = 0;
  std::uint64_t era_ = 0;
  std::vector<Kind> kinds_;
  std::unordered_map<std::string, std::size_t> names_;
  std::unordered_map<std::string, Key> keys_;
};

}  // namespace mctl
