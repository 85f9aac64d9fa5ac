// How long things took: a histogram whose steps are at most 3.2 %, for quantiles that are worth comparing.
//
// From 1 µs to 137 s, each doubling is divided into 32 bins of equal width (as in HdrHistogram): a value's bin is its
// leading five bits behind the first one, so adding costs a few instructions. What is shorter or longer is in the first
// or the last bin. 866 counts; a histogram that has none takes no memory for them.
#pragma once

#include <boost/json.hpp>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "format/result.h"

namespace mctl {

class Latencies {
 public:
  static constexpr std::size_t kBins = 866;
  static std::size_t bin_of(std::int64_t ns);
  static std::int64_t lower_ns(std::size_t bin);  // of the values in it the least
  static std::int64_t upper_ns(std::size_t bin);  // and the first beyond it

  void add(std::int64_t ns, std::uint64_t times = 1);
  void add(const Latencies& other);
  std::uint64_t count() const { return count_; }
  std::span<const std::uint64_t> counts() const { return counts_; }  // of the bins; empty: nothing was added

  // The upper end of the bin in which the k-th smallest is, k from 1 to count().
  std::int64_t ranked_ns(std::uint64_t k) const;
  // The smallest value that a share q of all does not exceed, to within a step; 0 if there is none.
  std::int64_t quantile_ns(double q) const;

  boost::json::array to_json() const;  // [[bin's lower end in ns, count], …], without empty bins

 private:
  std::vector<std::uint64_t> counts_;
  std::uint64_t count_ = 0;
};

}  // namespace mctl
