// What changed in a server of many models, why, and by whom: the last of it, and those who listen.
#pragma once

#include <boost/json.hpp>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace mctl {

struct Event {
  std::uint64_t id = 0;    // ascending from 1
  std::int64_t at_ms = 0;  // since the epoch
  std::string kind;        // changed | loading | ready | failed | unloaded | rollout
  boost::json::object fields;
};

boost::json::object event_to_json(const Event& event);

class Events {
 public:
  static constexpr std::size_t kKept = 1000;
  using Listener = std::function<void(const Event&)>;

  void tell(std::string kind, boost::json::object fields);
  // Hears of all that comes, for as long as what is returned lives.
  std::shared_ptr<const void> listen(Listener listener);
  const std::deque<Event>& kept() const { return kept_; }

 private:
  std::deque<Event> kept_;
  std::uint64_t last_ = 0;
  std::vector<std::weak_ptr<const Listener>> listeners_;
};

}  // namespace mctl
