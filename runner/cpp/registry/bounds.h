// What counts say for certain: one-sided bounds of a rate and of a ratio of quantiles. `level` is the chance to be
// wrong: 0.05 for a bound that holds with 95 %.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "engine/latencies.h"

namespace mctl {

// P(X >= x) where X counts the successes among n tries of chance p.
double binomial_tail(std::int64_t n, std::int64_t x, double p);

// The largest rate that n tries with x successes exclude: Clopper and Pearson, "The use of confidence or fiducial
// limits", Biometrika 26, 1934. The p for which P(X >= x) is `level`; 0 if x is 0.
double lower_bound_of_rate(std::int64_t x, std::int64_t n, double level);

// Whether that bound is above `limit`, for which no bound has to be found: P(X >= x | limit) < level.
bool rate_is_above(std::int64_t x, std::int64_t n, double limit, double level);

using LatenciesByBucket = std::map<std::string, Latencies, std::less<>>;

struct QuantileRatio {
  double estimate = 0, lower_bound = 0;
  std::int64_t compared = 0;  // values of `fresh`
};

// How many times as long the q-quantile of `fresh` is as that of `old`, at equal buckets; nullopt if there is no bucket
// where that can be said. Free of any distribution, from order statistics:
//
// 1. Of each bucket that both have, u is an upper bound of old's quantile: its s-th smallest value, with the smallest s
//    for which P(X >= s) <= level / 2 / buckets, where X counts n tries of chance q (David and Nagaraja, "Order
//    Statistics", section 7.1). A bucket where `old` has too few values for that is left out.
// 2. Were fresh's quantile in every bucket at most r times old's, each of its values would be above r * u with a chance
//    of at most 1 - q, whatever its bucket. So all buckets together are one count of tries: the bound is its x-th
//    largest value, in multiples of its bucket's u, with the smallest x for which P(X >= x) <= level / 2.
//
// Of a bin of `fresh` the lower end counts, of one of `old` the upper end: the bound is at most two steps of a bin, or
// 6.4 %, too low, and never too high.
std::optional<QuantileRatio> ratio_of_quantiles(const LatenciesByBucket& fresh, const LatenciesByBucket& old, double q,
                                                double level);

}  // namespace mctl
