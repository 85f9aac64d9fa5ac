#include "registry/merge_patch.h"

namespace mctl {

namespace json = boost::json;

json::value merged(const json::value& target, const json::value& patch) {
  const auto* changes = patch.if_object();
  if (changes == nullptr) return patch;
  json::object result = target.is_object() ? target.get_object() : json::object();
  for (const auto& [key, change] : *changes) {
    if (change.is_null())
      result.erase(key);
    else
      result[key] = merged(result.contains(key) ? result.at(key) : json::value(), change);
  }
  return result;
}

json::value merge_difference(const json::value& before, const json::value& after) {
  if (!before.is_object() || !after.is_object()) return after;
  json::object patch;
  for (const auto& [key, old] : before.get_object())
    if (!after.get_object().contains(key)) patch[key] = nullptr;
  for (const auto& [key, now] : after.get_object()) {
    const auto* old = before.get_object().if_contains(key);
    if (old == nullptr)
      patch[key] = now;
    else if (*old != now)
      patch[key] = merge_difference(*old, now);
  }
  return patch;
}

}  // namespace mctl
