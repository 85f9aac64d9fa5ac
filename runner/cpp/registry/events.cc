#include "registry/events.h"

#include <chrono>
#include <utility>

namespace mctl {

boost::json::object event_to_json(const Event& event) {
  boost::json::object object{{"id", event.id}, {"at_ms", event.at_ms}, {"kind", event.kind}};
  for (const auto& field : event.fields) object[field.key()] = field.value();
  return object;
}

void Events::tell(std::string kind, boost::json::object fields) {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  kept_.push_back({++last_, now / std::chrono::milliseconds(1), std::move(kind), std::move(fields)});
  if (kept_.size() > kKept) kept_.pop_front();
  std::erase_if(listeners_, [](const auto& listener) { return listener.expired(); });
  for (const auto& listener : std::vector(listeners_))
    if (const auto hears = listener.lock()) (*hears)(kept_.back());
}

std::shared_ptr<const void> Events::listen(Listener listener) {
  auto kept = std::make_shared<const Listener>(std::move(listener));
  listeners_.push_back(kept);
  return kept;
}

}  // namespace mctl
