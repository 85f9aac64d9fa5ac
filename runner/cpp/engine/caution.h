// Whether requests had better run alone. Requests may be what ends the model's processes, and one that does costs all
// that share its batch a second run and a restart: so after two deaths in a row nothing shares, until none comes for a
// while.
#pragma once

#include <cstdint>
#include <optional>

namespace mctl {

class Caution {
 public:
  static constexpr std::int64_t kWhile_us = 30'000'000;

  // A process ended while it ran a batch. True if that is why requests run alone from now on.
  bool died(std::int64_t now_us) {
    const bool again = last_us_ && now_us - *last_us_ < kWhile_us, before = alone(now_us);
    last_us_ = now_us;
    if (again) until_us_ = now_us + kWhile_us;
    return again && !before;
  }

  bool alone(std::int64_t now_us) const { return until_us_ && now_us < *until_us_; }

 private:
  std::optional<std::int64_t> last_us_, until_us_;
};

}  // namespace mctl
