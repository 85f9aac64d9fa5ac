// When a process that ended is started again, and whether requests wait for that.
#pragma once

#include <algorithm>
#include <chrono>

namespace mctl {

class Backoff {
 public:
  // Twice the last pause.
  std::chrono::milliseconds next() {
    using namespace std::chrono_literals;
    return pause_ = std::clamp<std::chrono::milliseconds>(2 * pause_, 100ms, 10'000ms);
  }
  void reset() { pause_ = std::chrono::milliseconds(0); }

  void failed() { ++failed_; }  // it ended before it was ready
  void ready() { failed_ = 0; }
  bool hopeful() const { return failed_ < kMostFailed; }

 private:
  static constexpr int kMostFailed = 3;  // in a row

  std::chrono::milliseconds pause_{0};
  int failed_ = 0;
};

}  // namespace mctl
