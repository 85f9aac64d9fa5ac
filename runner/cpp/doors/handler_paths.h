// Which requests are a handler's: paths and routes, as functions of values.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "doors/http.h"
#include "doors/path.h"
#include "format/result.h"
#include "pool/handler_messages.h"

namespace mctl {

// What a path says of a model's handler.
struct HandlerPath {
  std::string name, version;      // of the model; a version only if the path says that it is one
  std::vector<std::string> rest;  // below it
};

// `/predictions/NAME…` and `/v2/models/NAME[/versions/V]/predict`; nullopt: no path of these.
std::optional<HandlerPath> handler_path(std::span<const std::string> path);

// Does a route take these segments? `{x}` takes any one.
bool takes(const HandlerRoute& route, std::span<const std::string> path);

// How routes meet a request. `allowed` has the verbs of those that take the path, for the Allow line.
struct RouteMatch {
  bool path = false, verb = false;
  std::string allowed;
};
RouteMatch match(std::span<const HandlerRoute> routes, std::string_view verb, std::span<const std::string> path);

// Could one path be of both?
bool overlap(const HandlerRoute& one, const HandlerRoute& other);

// A route that handlers share: which of them a request is for, its body says.
bool is_shared(const HandlerRoute& route);

// Code::usage: a route that is no path, or would hide one of the server's own.
Status check_route(const HandlerRoute& route);

// The lines of a request's head behind the first, names in lower case.
HeaderLines lines_of(std::string_view head);

// A handler's lines as an answer may have them: `type` gets the content type. Code::model: what no answer may have.
Result<std::string> fields_from(const HeaderLines& lines, std::string& type);

}  // namespace mctl
