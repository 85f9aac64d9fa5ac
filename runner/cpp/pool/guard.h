// Handlers of the event loop that do nothing once their owner is gone.
#pragma once

#include <memory>
#include <utility>

namespace mctl {

class Guard {
 public:
  // A handler that calls `f` with what it is called with, while this lives.
  template <class F>
  auto operator()(F f) const {
    return [alive = std::weak_ptr(alive_), f = std::move(f)](auto&&... arguments) {
      if (!alive.expired()) f(std::forward<decltype(arguments)>(arguments)...);
    };
  }

 private:
  std::shared_ptr<char> alive_ = std::make_shared<char>();
};

}  // namespace mctl
