#include "doors/handler_paths.h"

#include <algorithm>
#include <boost/beast/core/string.hpp>

#include "format/text.h"

namespace mctl {
namespace {

using boost::beast::iequals;

bool is_open(std::string_view segment) { return segment.starts_with('{') && segment.ends_with('}'); }

std::string lower(std::string_view text) {
  std::string out(text);
  std::ranges::transform(out, out.begin(), [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c | 32) : c; });
  return out;
}

std::string_view trimmed(std::string_view text) {
  const std::size_t first = text.find_first_not_of(" \t");
  if (first == text.npos) return {};
  return text.substr(first, text.find_last_not_of(" \t") + 1 - first);
}

bool is_token(std::string_view name) {
  return !name.empty() && std::ranges::all_of(name, [](unsigned char c) {
    return std::isalnum(c) != 0 ||
           std::string_view("!#$%&'*+-.^_`|~").find(static_cast<char>(c)) != std::string_view::npos;
  });
}

bool is_one_line(std::string_view value) {
  return std::ranges::none_of(value, [](unsigned char c) { return (c < 0x20 && c != '\t') || c == 0x7f; });
}

// Those that say how bytes go over the connection, and those that are the server's.
bool is_server_s(std::string_view name) {
  for (const std::string_view own : {"connection", "content-length", "date", "keep-alive", "server", "trailer",
                                     "transfer-encoding", "upgrade", "x-mctl-version", "x-request-id"}) {
    if (iequals(name, own)) return true;
  }
  return false;
}

// A GET answers HEAD too.
bool takes_verb(const HandlerRoute& route, std::string_view verb) {
  return route.method == verb || (verb == "HEAD" && route.method == "GET");
}

}  // namespace

std::optional<HandlerPath> handler_path(std::span<const std::string> path) {
  if (path.size() >= 2 && path[0] == "predictions") return HandlerPath{path[1], {}, {path.begin() + 2, path.end()}};
  if (path.size() < 4 || path[0] != "v2" || path[1] != "models" || path.back() != "predict") return std::nullopt;
  if (path.size() == 4) return HandlerPath{path[2], {}, {}};
  if (path.size() == 6 && path[3] == "versions") return HandlerPath{path[2], path[4], {}};
  return std::nullopt;
}

bool takes(const HandlerRoute& route, std::span<const std::string> path) {
  const auto own = segments_of(route.path);
  return std::ranges::equal(own, path, [](const std::string& mine, const std::string& its) {
    return is_open(mine) ? !its.empty() : mine == its;
  });
}

RouteMatch match(std::span<const HandlerRoute> routes, std::string_view verb, std::span<const std::string> path) {
  RouteMatch found;
  for (const HandlerRoute& route : routes) {
    if (!takes(route, path)) continue;
    found.path = true;
    found.verb = found.verb || takes_verb(route, verb);
    if (!found.allowed.empty()) found.allowed += ", ";
    found.allowed += route.method == "GET" ? "GET, HEAD" : route.method;
  }
  return found;
}

bool overlap(const HandlerRoute& one, const HandlerRoute& other) {
  if (one.method != other.method) return false;
  return std::ranges::equal(segments_of(one.path), segments_of(other.path), [](const auto& mine, const auto& its) {
    return is_open(mine) || is_open(its) || mine == its;
  });
}

bool is_shared(const HandlerRoute& route) { return route.path.starts_with("/v1/"); }

Status check_route(const HandlerRoute& route) {
  const std::string shown = "the route `" + printable(route.method + " " + route.path) + "`";
  if (!is_token(route.method) || lower(route.method) == route.method) {
    return Error{Code::usage, shown + " has no verb such as POST"};
  }
  const auto path = segments_of(route.path);
  if (!route.path.starts_with('/') || path.empty()) return Error{Code::usage, shown + " is no path such as /classify"};
  for (const std::string_view own : {"v2", "metrics", "predictions", "admin", "models", "ping", "config"}) {
    if (path[0] == own) return Error{Code::usage, shown + " would hide a path of the server's own"};
  }
  if (is_open(path[0])) return Error{Code::usage, shown + " begins with what stands for any name"};
  return Done{};
}

HeaderLines lines_of(std::string_view head) {
  HeaderLines lines;
  for (std::size_t at = head.find("\r\n"); at != head.npos && at + 2 < head.size();) {
    const std::size_t begin = at + 2;
    at = head.find("\r\n", begin);
    const std::string_view line = head.substr(begin, at == head.npos ? head.npos : at - begin);
    const std::size_t colon = line.find(':');
    if (line.empty() || colon == line.npos) continue;
    lines.emplace_back(lower(line.substr(0, colon)), trimmed(line.substr(colon + 1)));
  }
  return lines;
}

Result<std::string> fields_from(const HeaderLines& lines, std::string& type) {
  std::string fields;
  for (const auto& [name, value] : lines) {
    if (!is_token(name) || !is_one_line(value)) {
      return Error{Code::model, "the handler's answer has the header '" + printable(name) + "', which cannot be sent"};
    }
    if (is_server_s(name)) continue;
    if (iequals(name, "content-type")) {
      type = value;
    } else {
      fields += name + ": " + value + "\r\n";
    }
  }
  return fields;
}

}  // namespace mctl
