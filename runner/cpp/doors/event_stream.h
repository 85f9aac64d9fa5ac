// Events to clients that listen: server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html).
#pragma once

#include <cstdint>
#include <memory>
#include <set>

#include "doors/connection.h"
#include "registry/events.h"

namespace mctl {

class EventStreams {
 public:
  explicit EventStreams(Events& events) : events_(events) {}

  // Those that are kept and came after the one with this id, then all that come, until the client goes.
  void begin(const std::shared_ptr<Connection>& connection, std::uint64_t after);
  void end();  // the server goes away

 private:
  struct Stream;

  Events& events_;
  std::set<std::shared_ptr<Stream>> streams_;
};

}  // namespace mctl
