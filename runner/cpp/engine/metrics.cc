#include "engine/metrics.h"

#include <algorithm>
#include <chrono>

namespace mctl {
namespace {

constexpr double kSeconds[] = {0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025,
                               0.05,   0.1,     0.25,   0.5,   1,      2.5,   5,    10};
constexpr double kRows[] = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024};
constexpr double kNanosecond = 1e-9;

}  // namespace

Outcome outcome_of(Code code) {
  switch (code) {
    case Code::unavailable:
      return Outcome::rejected;
    case Code::deadline:
      return Outcome::expired;
    case Code::model:
    case Code::damaged:
    case Code::host:
    case Code::usage:
    case Code::internal:
      return Outcome::error;
    default:
      return Outcome::invalid;
  }
}

Histogram Histogram::of_seconds() { return Histogram(kSeconds); }
Histogram Histogram::of_rows() { return Histogram(kRows); }

void Histogram::add(double value) {
  ++counts_[std::lower_bound(bounds_.begin(), bounds_.end(), value) - bounds_.begin()];
  sum_ += value;
}

void Metrics::request(Outcome outcome, std::uint64_t total_ns) {
  ++requests[static_cast<std::size_t>(outcome)];
  request_seconds.add(static_cast<double>(total_ns) * kNanosecond);
  (outcome == Outcome::ok ? success : fail).add(total_ns);
}

void Metrics::waited(std::uint64_t queue_ns) { queue_seconds.add(static_cast<double>(queue_ns) * kNanosecond); }

void Metrics::batch_started(const BatchFacts& batch) {
  ++batches[{batch.bucket, batch.reason}];
  batch_rows.add(static_cast<double>(batch.rows));
  padded_rows += static_cast<std::uint64_t>(batch.padded - batch.rows);
}

void Metrics::batch_done(const BatchFacts& batch, const Answered& answered, std::uint64_t input_ns,
                         std::uint64_t compute_ns, std::uint64_t output_ns) {
  if (judged) (*judged)[batch.bucket].add(static_cast<std::int64_t>(compute_ns));
  Histogram& compute = compute_seconds.try_emplace(batch.bucket, Histogram::of_seconds()).first->second;
  compute.add(static_cast<double>(compute_ns) * kNanosecond);
  auto& mine = by_rows[batch.rows];
  mine[0].add(input_ns);
  mine[1].add(compute_ns);
  mine[2].add(output_ns);
  input.add(input_ns, answered.requests);
  infer.add(compute_ns, answered.requests);
  output.add(output_ns, answered.requests);
  queue.count += answered.requests;
  queue.ns += answered.queue_ns;
  inferences += answered.rows;
  ++executions;
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  last_ms = std::chrono::duration_cast<std::chrono::milliseconds>(now).count();
}

void HandlerMetrics::request(Outcome outcome, std::uint64_t total_ns) {
  ++requests[static_cast<std::size_t>(outcome)];
  seconds.add(static_cast<double>(total_ns) * 1e-9);
}

}  // namespace mctl
