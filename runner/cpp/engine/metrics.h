// What is counted for one model. doors/exposition.h prints it.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/latencies.h"
#include "engine/policy.h"
#include "format/result.h"

namespace mctl {

class Histogram {
 public:
  static Histogram of_seconds();
  static Histogram of_rows();

  void add(double value);
  std::span<const double> bounds() const { return bounds_; }         // upper, included
  std::span<const std::uint64_t> counts() const { return counts_; }  // one more than bounds: what is above them all
  double sum() const { return sum_; }

 private:
  explicit Histogram(std::span<const double> bounds) : bounds_(bounds), counts_(bounds.size() + 1) {}

  std::span<const double> bounds_;
  std::vector<std::uint64_t> counts_;
  double sum_ = 0;
};

struct Duration {
  std::uint64_t count = 0, ns = 0;
  // `times` things, each of which took this long.
  void add(std::uint64_t time_ns, std::uint64_t times = 1) {
    count += times;
    ns += times * time_ns;
  }
};

enum class Outcome : std::uint8_t { ok, invalid, rejected, expired, cancelled, error };
constexpr std::array<std::string_view, 6> kOutcomes = {"ok", "invalid", "rejected", "expired", "cancelled", "error"};
Outcome outcome_of(Code code);  // of a request that ended with this error

// Numbers that are looked up, not counted, when somebody asks.
struct Gauges {
  std::int64_t queue_rows = 0, queue_capacity = 0, inflight = 0, limit = 0, expected_wait_us = 0;
  bool ready = false;
  std::int64_t live_workers = 0, starting_workers = 0;
  std::vector<int> workers;  // their process ids
};

// What is counted for a model's handler, and what is looked up.
struct HandlerMetrics {
  void request(Outcome outcome, std::uint64_t total_ns);

  std::array<std::uint64_t, kOutcomes.size()> requests{};
  Histogram seconds = Histogram::of_seconds();
  std::uint64_t calls = 0;  // of models
  std::map<std::string, std::uint64_t> restarts = {{"broken", 0}, {"crash", 0}, {"load", 0}, {"stuck", 0}};
  double ended_cpu_seconds = 0;  // of processes that are no more
};
struct HandlerGauges {
  std::int64_t queued = 0, running = 0, live = 0, starting = 0;
  std::vector<int> processes;  // their process ids
};

struct BatchFacts {
  std::string bucket;
  Reason reason;
  std::int64_t rows, padded;  // before and after padding
};

// The requests whose answers a batch completed.
struct Answered {
  std::uint64_t requests = 0, rows = 0, queue_ns = 0;
};

// Requests that another version has answered, and this one was tried with.
struct Shadowed {
  std::uint64_t compared = 0, differed = 0;  // differed: also those that it failed on
  std::uint64_t dropped = 0;
  std::string last;              // what differed last, for a person
  std::vector<std::string> ids;  // of the requests that differed last
};

struct Metrics {
  void request(Outcome outcome, std::uint64_t total_ns);
  void batch_started(const BatchFacts& batch);
  void batch_done(const BatchFacts& batch, const Answered& answered, std::uint64_t input_ns, std::uint64_t compute_ns,
                  std::uint64_t output_ns);
  void waited(std::uint64_t queue_ns);

  std::array<std::uint64_t, kOutcomes.size()> requests{};
  Histogram request_seconds = Histogram::of_seconds(), queue_seconds = Histogram::of_seconds();
  Histogram batch_rows = Histogram::of_rows();
  std::map<std::string, Histogram> compute_seconds;  // by bucket
  std::map<std::pair<std::string, Reason>, std::uint64_t> batches;
  std::uint64_t padded_rows = 0;
  std::map<std::string, std::uint64_t> restarts = {{"crash", 0}, {"stuck", 0}, {"load", 0}};
  std::optional<std::map<std::string, Latencies, std::less<>>> judged;  // compute by bucket, while a rollout asks
  Shadowed shadowed;
  std::vector<double> load_seconds;  // verify, load, warmup, golden
  double ended_cpu_seconds = 0;      // of workers that are no more

  // Triton's: requests, each with the whole time of its batch, then batches by their rows.
  Duration success, fail, queue, input, infer, output;
  std::uint64_t inferences = 0, executions = 0, last_ms = 0;
  std::map<std::int64_t, std::array<Duration, 3>> by_rows;  // input, infer, output
};

}  // namespace mctl
