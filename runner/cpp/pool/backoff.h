// How long to wait before a process that ended is started again.
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

 private:
  std::chrono::milliseconds pause_{0};
};

}  // namespace mctl
