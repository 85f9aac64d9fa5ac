// Every byte that clients make the server hold is counted here: heads, bodies, inflated and parsed, answers unread.
//
// 1. All clients together hold `limit` bytes at most.
// 2. One client, that is one address, holds half of that at most.
// 3. Those who have not shown the token that the server needs hold an eighth of it at most, all of them together: there
//    is room for those who have it.
//
// What every connection needs in any case, its seat, is set aside for as many connections as there may be.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>

namespace mctl {

class Budget {
 public:
  explicit Budget(std::size_t limit) : limit_(limit) {}

  class Holding;
  std::size_t held() const { return held_; }
  std::size_t limit() const { return limit_; }
  std::size_t most_of_one() const { return limit_ / 2; }

 private:
  const std::size_t limit_;
  std::size_t held_ = 0, strangers_ = 0;                    // bytes
  std::unordered_map<std::uint64_t, std::size_t> clients_;  // bytes of those that hold any
};

// What one connection holds; given back when it ends.
class Budget::Holding {
 public:
  Holding(Budget& budget, std::uint64_t client) : budget_(budget), client_(client) {}
  ~Holding() { clear(); }
  Holding(const Holding&) = delete;
  Holding& operator=(const Holding&) = delete;

  // From now on it is so many bytes, of a client that is `known` to be allowed to use the server. False if that would
  // be over a limit: then nothing has changed. Less can always be held.
  [[nodiscard]] bool set(std::size_t bytes, bool known);
  void clear();
  std::size_t bytes() const { return bytes_; }

 private:
  Budget& budget_;
  const std::uint64_t client_;
  std::size_t bytes_ = 0;
  bool known_ = true;
};

}  // namespace mctl
