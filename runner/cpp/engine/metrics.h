// What the server counts, as Prometheus text (GET /metrics) and as Triton's statistics (GET …/stats).
#pragma once

#include <sys/types.h>

#include <array>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/policy.h"
#include "format/manifest.h"

namespace mctl {

class Histogram {
 public:
  explicit Histogram(std::span<const double> bounds) : bounds_(bounds), counts_(bounds.size() + 1) {}
  static Histogram of_seconds();
  static Histogram of_rows();

  void add(double value);
  void append(std::string& out, std::string_view name, std::string_view labels) const;

 private:
  std::span<const double> bounds_;  // upper, included
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
Outcome outcome_of(unsigned status);  // of an answer that its client is there to take

// Numbers that are looked up, not counted, when somebody asks.
struct Gauges {
  std::int64_t queue_rows = 0, queue_capacity = 0, inflight = 0, limit = 0, expected_wait_us = 0;
  bool ready = false;
  std::int64_t live_workers = 0, starting_workers = 0;
  std::vector<pid_t> workers;
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

class Metrics {
 public:
  explicit Metrics(const Manifest& manifest);

  void request(Outcome outcome, std::uint64_t total_ns);
  void batch_started(const BatchFacts& batch);
  void batch_done(const BatchFacts& batch, const Answered& answered, std::uint64_t input_ns, std::uint64_t compute_ns,
                  std::uint64_t output_ns);
  void waited(std::uint64_t queue_ns);
  void restarted(const std::string& reason) { ++restarts_[reason]; }
  void loaded(std::span<const double> seconds) { load_seconds_.assign(seconds.begin(), seconds.end()); }
  void worker_ended(double cpu_seconds) { ended_cpu_seconds_ += cpu_seconds; }

  std::string prometheus(const Gauges& gauges) const;
  std::string statistics() const;

 private:
  void append_serving(std::string& out, const Gauges& gauges) const;
  void append_batches(std::string& out) const;
  void append_process(std::string& out, const Gauges& gauges) const;

  const Manifest& manifest_;
  std::string labels_;  // model and version
  std::array<std::uint64_t, kOutcomes.size()> requests_{};
  Histogram request_ = Histogram::of_seconds(), queue_ = Histogram::of_seconds(), rows_ = Histogram::of_rows();
  std::map<std::string, Histogram> compute_;  // by bucket
  std::map<std::pair<std::string, Reason>, std::uint64_t> batches_;
  std::uint64_t padded_rows_ = 0;
  std::map<std::string, std::uint64_t> restarts_ = {{"crash", 0}, {"stuck", 0}, {"load", 0}};
  std::vector<double> load_seconds_;  // verify, load, warmup, golden
  double ended_cpu_seconds_ = 0;

  // Triton's: requests, each with the whole time of its batch, then batches by their rows.
  Duration success_, fail_, waits_, input_, infer_, output_;
  std::uint64_t inferences_ = 0, executions_ = 0, last_ms_ = 0;
  std::map<std::int64_t, std::array<Duration, 3>> by_rows_;
};

}  // namespace mctl
