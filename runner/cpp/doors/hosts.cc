#include "doors/hosts.h"

#include <algorithm>
#include <boost/beast/core/string.hpp>

namespace mctl {

std::string_view name_of_host(std::string_view host) {
  const std::size_t from = host.starts_with('[') ? std::min(host.find(']'), host.size()) : 0;
  host = host.substr(0, host.find(':', from));
  if (host.starts_with('[') && host.ends_with(']')) host = host.substr(1, host.size() - 2);
  if (host.ends_with('.')) host.remove_suffix(1);  // a name from the root
  return host;
}

Hosts Hosts::from_option(std::string_view list) {
  std::vector<std::string> names;
  while (!list.empty()) {
    const std::size_t end = std::min(list.find(','), list.size());
    const std::string_view name = list.substr(0, end);
    if (name == "*") return {};
    if (!name.empty()) names.emplace_back(name_of_host(name));
    list.remove_prefix(std::min(end + 1, list.size()));
  }
  return Hosts(std::move(names));
}

Hosts Hosts::of_loopback(std::string_view listening_on) {
  return Hosts({"localhost", "127.0.0.1", "::1", std::string(listening_on)});
}

bool Hosts::knows(std::string_view name) const {
  return std::ranges::any_of(names_, [&](const std::string& known) { return boost::beast::iequals(known, name); });
}

bool Hosts::allow(std::string_view host, std::string_view origin) const {
  if (names_.empty()) return true;
  if (!origin.empty()) {
    const std::size_t scheme = origin.find("://");
    if (scheme == origin.npos || !knows(name_of_host(origin.substr(scheme + 3)))) return false;
  }
  return host.empty() || knows(name_of_host(host));
}

}  // namespace mctl
