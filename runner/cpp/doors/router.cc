#include "doors/router.h"

#include <random>
#include <vector>

#include "doors/access_log.h"
#include "doors/exposition.h"
#include "doors/metadata.h"
#include "format/text.h"

namespace mctl {
namespace {

constexpr std::string_view kRead = "GET, HEAD";

Answer with_body(std::string body, std::string_view type = "application/json") {
  Answer answer;
  answer.body = std::move(body);
  answer.type = type;
  return answer;
}

Answer not_found(std::string text) { return refusal({Code::not_found, std::move(text)}); }

Answer wrong_verb(std::string_view allowed) {
  Answer answer = refusal({Code::method, "this path takes " + std::string(allowed)});
  answer.fields = "Allow: " + std::string(allowed) + "\r\n";
  return answer;
}

std::int64_t age_of(const Connection& connection) {
  return now_ns() - connection.begun().time_since_epoch() / std::chrono::nanoseconds(1);
}

bool reads(const Head& head) { return head.verb == Verb::get || head.verb == Verb::head; }

int hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if ((c | 32) >= 'a' && (c | 32) <= 'f') return (c | 32) - 'a' + 10;
  return -1;
}

std::string decoded(std::string_view text) {
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const bool escape = text[i] == '%' && i + 2 < text.size() && hex_digit(text[i + 1]) >= 0;
    if (escape && hex_digit(text[i + 2]) >= 0) {
      out += static_cast<char>(hex_digit(text[i + 1]) * 16 + hex_digit(text[i + 2]));
      i += 2;
    } else {
      out += text[i];
    }
  }
  return out;
}

// The segments of a path, decoded; a slash at the end makes no difference.
std::vector<std::string> segments_of(std::string_view target) {
  target = target.substr(0, target.find_first_of("?#"));
  std::vector<std::string> segments;
  while (!target.empty()) {
    target.remove_prefix(target.front() == '/' ? 1 : 0);
    const std::size_t end = std::min(target.find('/'), target.size());
    if (end > 0 || end < target.size()) segments.push_back(decoded(target.substr(0, end)));
    target.remove_prefix(end);
  }
  return segments;
}

// What comes after a model's name and, maybe, version.
std::span<const std::string> rest_of(std::span<const std::string> path) {
  return path.subspan(path.size() >= 5 && path[3] == "versions" ? 5 : 3);
}

// The version that a path names; empty: none.
std::string_view version_of(std::span<const std::string> path) {
  return path.size() >= 5 && path[3] == "versions" ? std::string_view(path[4]) : std::string_view();
}

// Extensions of Triton's that clients may ask for.
bool is_extension(std::span<const std::string> path) {
  const std::string& first = path.front();
  return first == "repository" || first == "systemsharedmemory" || first == "cudasharedmemory" || first == "trace" ||
         first == "logging";
}

bool is_model_extension(std::string_view name) {
  return name == "config" || name == "trace" || name == "generate" || name == "generate_stream" || name == "load" ||
         name == "unload";
}

Counted counted_of(const ServedModel& model) {
  return {model.name(), model.version(), model.manifest(), model.metrics()};
}

std::vector<Counted> counted(std::span<const std::shared_ptr<ServedModel>> models) {
  std::vector<Counted> all;
  for (const auto& model : models) all.push_back(counted_of(*model));
  return all;
}

Listed listed_as(const ServedModel& model) {
  return {model.name(), model.version(), model.manifest(), model.max_request_rows()};
}

}  // namespace

Router::Router(const Models& models, RouterSettings settings)
    : models_(models),
      settings_(std::move(settings)),
      next_id_(static_cast<std::uint64_t>(std::random_device{}()) << 32) {}

void Router::serve(const std::shared_ptr<Connection>& connection) {
  const Head& head = connection->head();
  if (auto permitted = permit(head); !permitted) return connection->respond(refuse(*connection, permitted.error()));
  if (ServedModel* const model = infers(head)) return infer(connection, *model);
  Answer answer = route(head, segments_of(head.target));
  if (settings_.log) settings_.log(line_of({*connection, head.request_id, answer.status, age_of(*connection)}));
  connection->respond(std::move(answer));
}

bool Router::knows(const Head& head) const {
  return settings_.token.empty() || bears(head.authorization, settings_.token);
}

bool Router::probes(const Head& head) const {
  const auto path = segments_of(head.target);
  return reads(head) && path.size() == 3 && path[0] == "v2" && path[1] == "health";
}

// Probes have no token; everything else needs it.
Status Router::permit(const Head& head) const {
  if (knows(head) || probes(head)) return Done{};
  if (!head.authorization.empty()) return Error{Code::unauthorized, "this is not the token of this server"};
  return Error{Code::unauthorized, "this server needs a token: send `Authorization: Bearer TOKEN`"};
}

// A path that takes no body refuses one at once, and a large one is refused by all that its head tells.
std::optional<Answer> Router::screen(const Connection& connection, bool large) {
  const Head& head = connection.head();
  ServedModel* const model = infers(head);
  if (!large && model != nullptr) return std::nullopt;  // serve() sees to it
  if (auto permitted = permit(head); !permitted) return refuse(connection, permitted.error());
  if (model != nullptr) {
    Status room = available();
    if (room) room = model->admit(connection.client(), 1);
    return room ? std::nullopt : std::optional(refuse(connection, room.error()));
  }
  Answer answer = route(head, segments_of(head.target));
  if (answer.status == 200) answer = refusal({Code::too_large, "this path takes no body"});
  if (settings_.log) settings_.log(line_of({connection, head.request_id, answer.status, 0}));
  return answer;
}

// The model whose inference it is, if it is one's.
ServedModel* Router::infers(const Head& head) const {
  constexpr std::string_view before = "/v2/models/", after = "/infer";
  if (head.verb != Verb::post) return nullptr;
  const std::string_view target = head.target;
  if (target.size() > before.size() + after.size() && target.starts_with(before) && target.ends_with(after)) {
    const auto name = target.substr(before.size(), target.size() - before.size() - after.size());
    if (name.find_first_of("/%?") == name.npos) {  // as nearly all clients write it
      const auto found = models_.find(name);
      return found ? *found : nullptr;
    }
  }
  const auto path = segments_of(target);
  if (path.size() < 4 || path[0] != "v2" || path[1] != "models") return nullptr;
  const Path rest = rest_of(path);
  if (rest.size() != 1 || rest[0] != "infer") return nullptr;
  const auto found = models_.find(path[2], version_of(path));
  return found ? *found : nullptr;
}

Answer Router::route(const Head& head, Path path) const {
  const std::size_t depth = path.size();
  if (depth == 0) return reads(head) ? page(head) : wrong_verb(kRead);
  if (depth == 1 && path[0] == "metrics") {
    return reads(head) ? with_body(prometheus(with_gauges()), "text/plain; version=0.0.4; charset=utf-8")
                       : wrong_verb(kRead);
  }
  if (path[0] != "v2") return not_found("no such path: GET / lists them");
  if (depth == 1) return reads(head) ? with_body(server_metadata()) : wrong_verb(kRead);
  if (path[1] == "health" && depth == 3) {
    if (path[2] == "live") return reads(head) ? with_body("{\"live\":true}") : wrong_verb(kRead);
    if (path[2] == "ready") return reads(head) ? health() : wrong_verb(kRead);
  }
  if (path[1] == "models" && depth == 3 && path[2] == "stats" && models_.versions("stats").empty()) {
    return reads(head) ? with_body(statistics(counted(models_.all()))) : wrong_verb(kRead);
  }
  if (path[1] == "models" && depth >= 3) return model(head, path);
  if (is_extension(path.subspan(1))) return refusal({Code::unimplemented, "this extension is not implemented"});
  return not_found("no such path: GET / lists them");
}

Answer Router::model(const Head& head, Path path) const {
  const auto found = models_.find(path[2], version_of(path));
  if (!found) return refusal(found.error());
  const ServedModel& model = **found;
  const Path rest = rest_of(path);
  if (rest.empty()) return reads(head) ? metadata(model) : wrong_verb(kRead);
  if (rest.size() == 1 && rest[0] == "infer") return wrong_verb("POST");
  if (rest.size() == 1 && rest[0] == "stats") {
    if (!reads(head)) return wrong_verb(kRead);
    const Counted one[] = {counted_of(model)};
    return with_body(version_of(path).empty() ? statistics(counted(models_.versions(path[2]))) : statistics(one));
  }
  if (rest.size() == 1 && rest[0] == "ready") {
    if (!reads(head)) return wrong_verb(kRead);
    if (auto status = available(); !status) return refusal(status.error());
    if (auto status = model.ready(); !status) return refusal(status.error());
    std::string body = "{\"name\":";
    append_json_string(body, model.name());
    return with_body(body + ",\"ready\":true}");
  }
  if (is_model_extension(rest[0])) return refusal({Code::unimplemented, "this extension is not implemented"});
  return not_found("no such path: GET / lists them");
}

Answer Router::metadata(const ServedModel& model) const {
  std::vector<std::string> versions;
  for (const auto& version : models_.versions(model.name())) versions.push_back(version->version());
  return with_body(model_metadata(listed_as(model), versions));
}

std::vector<Counted> Router::with_gauges() const {
  std::vector<Counted> all = counted(models_.all());
  for (std::size_t i = 0; i < all.size(); ++i) {
    all[i].gauges = models_.all()[i]->gauges();
    all[i].gauges.ready = all[i].gauges.ready && !draining_;
  }
  return all;
}

Status Router::available() const {
  if (draining_) return Error{Code::unavailable, "draining: the server is going away"};
  return Done{};
}

Answer Router::health() const {
  const Status status = draining_ ? available() : models_.ready();
  if (status) return with_body("{\"ready\":true}");
  Answer answer = refusal(status.error());
  answer.body = "{\"ready\":false,\"error\":";
  append_json_string(answer.body, status.error().text);
  answer.body += '}';
  return answer;
}

Answer Router::page(const Head& head) const {
  const bool json = head.accept.find("application/json") != std::string::npos;
  std::vector<Listed> listed;
  for (const auto& model : models_.all()) listed.push_back(listed_as(*model));
  return with_body(front_page(listed, url_, !settings_.token.empty(), json),
                   json ? "application/json" : "text/plain; charset=utf-8");
}

Answer Router::refuse(const Connection& connection, const Error& error) {
  const Head& head = connection.head();
  Answer answer = refusal(error);
  if (ServedModel* const model = infers(head)) model->metrics().request(outcome_of(error.code), 0);
  if (settings_.log) settings_.log(line_of({connection, head.request_id, answer.status, 0}));
  return answer;
}

}  // namespace mctl
