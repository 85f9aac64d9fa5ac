#include "registry/bounds.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace mctl {
namespace {

constexpr double kNegligible = 1e-17;
constexpr int kHalvings = 100;

// P(X = k)
double binomial(std::int64_t n, std::int64_t k, double p) {
  const auto tries = static_cast<double>(n), hits = static_cast<double>(k);
  return std::exp(std::lgamma(tries + 1) - std::lgamma(hits + 1) - std::lgamma(tries - hits + 1) + hits * std::log(p) +
                  (tries - hits) * std::log1p(-p));
}

// P(X = from) + P(X = from + step) + …, away from the mean, where terms only shrink.
double sum_outward(std::int64_t n, std::int64_t from, std::int64_t step, double p) {
  const double odds = p / (1 - p);
  double term = binomial(n, from, p), sum = 0;
  for (std::int64_t k = from; 0 <= k && k <= n && term > sum * kNegligible; k += step) {
    sum += term;
    const auto hits = static_cast<double>(k), misses = static_cast<double>(n - k);
    term *= step > 0 ? misses / (hits + 1) * odds : hits / (misses + 1) / odds;
  }
  return sum;
}

// The smallest x for which P(X >= x) <= level, at most n + 1.
std::int64_t critical_count(std::int64_t n, double p, double level) {
  std::int64_t low = 0, high = n + 1;  // P(X >= low) > level >= P(X >= high)
  while (high - low > 1) {
    const std::int64_t middle = low + (high - low) / 2;
    (binomial_tail(n, middle, p) <= level ? high : low) = middle;
  }
  return high;
}

struct Values {
  double multiple;  // of the bucket's bound
  std::int64_t count;
};

double ranked_from_above(const std::vector<Values>& descending, std::int64_t rank) {
  for (const Values& values : descending)
    if ((rank -= values.count) <= 0) return values.multiple;
  return 0;
}

}  // namespace

double binomial_tail(std::int64_t n, std::int64_t x, double p) {
  if (x <= 0) return 1;
  if (x > n || p <= 0) return 0;
  if (p >= 1) return 1;
  if (static_cast<double>(x) > static_cast<double>(n) * p) return std::min(sum_outward(n, x, 1, p), 1.0);
  return std::max(1 - sum_outward(n, x - 1, -1, p), 0.0);
}

double lower_bound_of_rate(std::int64_t x, std::int64_t n, double level) {
  if (x <= 0 || n <= 0) return 0;
  double low = 0, high = static_cast<double>(x) / static_cast<double>(n);
  for (int i = 0; i < kHalvings; ++i) {
    const double middle = (low + high) / 2;
    (binomial_tail(n, x, middle) < level ? low : high) = middle;
  }
  return low;
}

bool rate_is_above(std::int64_t x, std::int64_t n, double limit, double level) {
  return x > 0 && binomial_tail(n, x, limit) < level;
}

std::optional<QuantileRatio> ratio_of_quantiles(const LatenciesByBucket& fresh, const LatenciesByBucket& old, double q,
                                                double level) {
  std::vector<std::pair<const Latencies*, const Latencies*>> both;
  for (const auto& [bucket, values] : fresh)
    if (const auto same = old.find(bucket); same != old.end() && values.count() > 0 && same->second.count() > 0)
      both.emplace_back(&values, &same->second);
  std::vector<Values> bounded, estimated;
  QuantileRatio ratio;
  for (const auto& [values, reference] : both) {
    const auto count = static_cast<std::int64_t>(reference->count());
    const std::int64_t rank = critical_count(count, q, level / 2 / static_cast<double>(both.size()));
    if (rank > count) continue;
    const auto bound = static_cast<double>(reference->ranked_ns(static_cast<std::uint64_t>(rank)));
    const auto point = static_cast<double>(reference->quantile_ns(q));
    ratio.compared += static_cast<std::int64_t>(values->count());
    for (std::size_t bin = 0; bin < values->counts().size(); ++bin) {
      const auto times = static_cast<std::int64_t>(values->counts()[bin]);
      if (times == 0) continue;
      bounded.push_back({static_cast<double>(Latencies::lower_ns(bin)) / bound, times});
      estimated.push_back({static_cast<double>(Latencies::upper_ns(bin)) / point, times});
    }
  }
  if (bounded.empty()) return std::nullopt;
  std::ranges::sort(bounded, std::greater(), &Values::multiple);
  std::ranges::sort(estimated, std::greater(), &Values::multiple);
  const std::int64_t rank = critical_count(ratio.compared, 1 - q, level / 2);
  ratio.lower_bound = ranked_from_above(bounded, rank);
  const auto above = std::floor((1 - q) * static_cast<double>(ratio.compared));
  ratio.estimate = ranked_from_above(estimated, static_cast<std::int64_t>(above) + 1);
  return ratio;
}

}  // namespace mctl
