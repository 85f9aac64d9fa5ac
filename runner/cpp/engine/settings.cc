#include "engine/settings.h"

#include "format/contract.h"

namespace mctl {

std::pair<std::string_view, std::string_view> split_handler(std::string_view text) {
  const std::size_t equals = text.find('=');
  if (equals == text.npos || !is_name(std::string(text.substr(0, equals)))) return {{}, text};
  return {text.substr(0, equals), text.substr(equals + 1)};
}

std::string HandlerRuntime::handler_of(std::string_view model) const {
  for (const std::string& each : handlers) {
    const auto [name, handler] = split_handler(each);
    if (name.empty() || name == model) return std::string(handler);
  }
  return {};
}

}  // namespace mctl
