// Which names of this server a request may use. A page of another site can make a browser send requests here under a
// name of that site's (DNS rebinding), and would be let read the answers.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace mctl {

class Hosts {
 public:
  Hosts() = default;  // any
  explicit Hosts(std::vector<std::string> names) : names_(std::move(names)) {}
  // Of `--allowed-hosts`: names with commas between them, `*` for any.
  static Hosts from_option(std::string_view list);
  // Those of a server that only this machine reaches.
  static Hosts of_loopback(std::string_view listening_on);

  // `host` is the value of a Host field, `origin` of an Origin field: ports mean nothing. Empty: there was none.
  bool allow(std::string_view host, std::string_view origin) const;

 private:
  bool knows(std::string_view name) const;

  std::vector<std::string> names_;  // none: any name will do
};

// The name in `name:port`, `1.2.3.4:port` or `[::1]:port`.
std::string_view name_of_host(std::string_view host);

}  // namespace mctl
