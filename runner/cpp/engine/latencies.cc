#include "engine/latencies.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace mctl {
namespace {

constexpr int kFirst = 10, kDoublings = 27, kSteps = 32;  // 2^10 ns is about 1 µs
constexpr int kStepBits = std::countr_zero(static_cast<unsigned>(kSteps));
static_assert(kDoublings * kSteps + 2 == Latencies::kBins);

}  // namespace

std::size_t Latencies::bin_of(std::int64_t ns) {
  if (ns < std::int64_t{1} << kFirst) return 0;
  const auto value = static_cast<std::uint64_t>(ns);
  const int exponent = std::bit_width(value) - 1;
  if (exponent >= kFirst + kDoublings) return kBins - 1;
  const std::uint64_t step = (value >> (exponent - kStepBits)) - kSteps;
  return 1 + static_cast<std::size_t>(exponent - kFirst) * kSteps + step;
}

std::int64_t Latencies::lower_ns(std::size_t bin) {
  if (bin == 0) return 0;
  const std::size_t exponent = kFirst + (bin - 1) / kSteps, step = (bin - 1) % kSteps;
  return static_cast<std::int64_t>((kSteps + step) << (exponent - kStepBits));
}

std::int64_t Latencies::upper_ns(std::size_t bin) { return lower_ns(std::min(bin + 1, kBins - 1)); }

void Latencies::add(std::int64_t ns, std::uint64_t times) {
  counts_.resize(kBins);
  counts_[bin_of(ns)] += times;
  count_ += times;
}

void Latencies::add(const Latencies& other) {
  if (other.counts_.empty()) return;
  counts_.resize(kBins);
  for (std::size_t bin = 0; bin < kBins; ++bin) counts_[bin] += other.counts_[bin];
  count_ += other.count_;
}

std::int64_t Latencies::ranked_ns(std::uint64_t k) const {
  std::uint64_t before = 0;
  for (std::size_t bin = 0; bin < counts_.size(); ++bin)
    if ((before += counts_[bin]) >= k) return upper_ns(bin);
  return 0;
}

std::int64_t Latencies::quantile_ns(double q) const {
  if (count_ == 0) return 0;
  const auto rank = static_cast<std::uint64_t>(std::ceil(q * static_cast<double>(count_)));
  return ranked_ns(std::clamp<std::uint64_t>(rank, 1, count_));
}

boost::json::array Latencies::to_json() const {
  boost::json::array list;
  for (std::size_t bin = 0; bin < counts_.size(); ++bin)
    if (counts_[bin] > 0) list.push_back(boost::json::array{lower_ns(bin), counts_[bin]});
  return list;
}

}  // namespace mctl
