#include "doors/router.h"

#include <random>
#include <vector>

#include "doors/access_log.h"
#include "doors/metadata.h"

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
  const bool versioned = path.size() >= 5 && path[3] == "versions";
  return path.subspan(versioned ? 5 : 3);
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

}  // namespace

Router::Router(const Manifest& manifest, RouterSettings settings, Packing& packing, Metrics& metrics,
               Supervisor* supervisor, Batcher* batcher)
    : manifest_(manifest),
      settings_(std::move(settings)),
      packing_(packing),
      metrics_(metrics),
      supervisor_(supervisor),
      batcher_(batcher),
      infer_path_("/v2/models/" + manifest.name + "/infer"),
      metadata_(model_metadata(manifest)),
      next_id_(static_cast<std::uint64_t>(std::random_device{}()) << 32) {}

void Router::serve(const std::shared_ptr<Connection>& connection) {
  const Head& head = connection->head();
  if (auto permitted = permit(head); !permitted) return connection->respond(refuse(*connection, permitted.error()));
  if (head.verb == Verb::post && head.target == infer_path_) return infer(connection);
  const auto path = segments_of(head.target);
  if (infers(head, path)) return infer(connection);
  Answer answer = route(head, path);
  if (settings_.log) settings_.log(line_of({*connection, head.request_id, answer.status, age_of(*connection)}));
  connection->respond(std::move(answer));
}

// Probes have no token; everything else needs it.
Status Router::permit(const Head& head) const {
  if (settings_.token.empty() || bears(head.authorization, settings_.token)) return Done{};
  const auto path = segments_of(head.target);
  if (path.size() == 3 && path[0] == "v2" && path[1] == "health") return Done{};
  if (!head.authorization.empty()) return Error{Code::unauthorized, "this is not the token of this server"};
  return Error{Code::unauthorized, "this server needs a token: send `Authorization: Bearer TOKEN`"};
}

Status Router::screen(const Connection& connection) {
  const Head& head = connection.head();
  if (auto permitted = permit(head); !permitted) return permitted;
  return infers(head, segments_of(head.target)) ? room(connection) : Done{};
}

// Is it this model's inference?
bool Router::infers(const Head& head, Path path) const {
  if (head.verb != Verb::post || path.size() < 4 || path[0] != "v2" || path[1] != "models") return false;
  const Path rest = rest_of(path);
  return rest.size() == 1 && rest[0] == "infer" && !refuse_model(path);
}

std::optional<Answer> Router::refuse_model(Path path) const {
  if (path[2] != manifest_.name) {
    return not_found("model '" + path[2] + "' is not here: this server has '" + manifest_.name + "'");
  }
  if (path.size() >= 5 && path[3] == "versions" && path[4] != manifest_.version) {
    return not_found("model '" + path[2] + "' has no version '" + path[4] + "': this is '" + manifest_.version + "'");
  }
  return std::nullopt;
}

Answer Router::route(const Head& head, Path path) const {
  const std::size_t depth = path.size();
  if (depth == 0) return reads(head) ? page(head) : wrong_verb(kRead);
  if (depth == 1 && path[0] == "metrics") {
    return reads(head) ? with_body(metrics_.prometheus(gauges()), "text/plain; version=0.0.4; charset=utf-8")
                       : wrong_verb(kRead);
  }
  if (path[0] != "v2") return not_found("no such path: GET / lists them");
  if (depth == 1) return reads(head) ? with_body(server_metadata()) : wrong_verb(kRead);
  if (path[1] == "health" && depth == 3) {
    if (path[2] == "live") return reads(head) ? with_body("{\"live\":true}") : wrong_verb(kRead);
    if (path[2] == "ready") return reads(head) ? health() : wrong_verb(kRead);
  }
  if (path[1] == "models" && depth == 3 && path[2] == "stats" && path[2] != manifest_.name) {
    return reads(head) ? with_body(metrics_.statistics()) : wrong_verb(kRead);  // of all models: there is one
  }
  if (path[1] == "models" && depth >= 3) return model(head, path);
  if (is_extension(path.subspan(1))) return refusal({Code::unimplemented, "this extension is not implemented"});
  return not_found("no such path: GET / lists them");
}

Answer Router::model(const Head& head, Path path) const {
  if (auto refused = refuse_model(path)) return *std::move(refused);
  const Path rest = rest_of(path);
  if (rest.empty()) return reads(head) ? with_body(metadata_) : wrong_verb(kRead);
  if (rest.size() == 1 && rest[0] == "infer") return wrong_verb("POST");
  if (rest.size() == 1 && rest[0] == "stats") return reads(head) ? with_body(metrics_.statistics()) : wrong_verb(kRead);
  if (rest.size() == 1 && rest[0] == "ready") {
    if (!reads(head)) return wrong_verb(kRead);
    if (auto status = available(); !status) return refusal(status.error());
    std::string body = "{\"name\":";
    append_json_string(body, manifest_.name);
    return with_body(body + ",\"ready\":true}");
  }
  if (is_model_extension(rest[0])) return refusal({Code::unimplemented, "this extension is not implemented"});
  return not_found("no such path: GET / lists them");
}

Status Router::available() const {
  if (draining_) return Error{Code::unavailable, "draining: the server is going away"};
  if (supervisor_ && !supervisor_->ready()) return Error{Code::unavailable, supervisor_->why_not()};
  return Done{};
}

Answer Router::health() const {
  const Status status = available();
  if (status) return with_body("{\"ready\":true}");
  Answer answer = refusal(status.error());
  answer.body = "{\"ready\":false,\"error\":";
  append_json_string(answer.body, status.error().text);
  answer.body += '}';
  return answer;
}

Answer Router::page(const Head& head) const {
  const bool json = head.accept.find("application/json") != std::string::npos;
  return with_body(front_page(manifest_, url_, !settings_.token.empty(), json),
                   json ? "application/json" : "text/plain; charset=utf-8");
}

Gauges Router::gauges() const {
  Gauges gauges;
  gauges.ready = static_cast<bool>(available());
  if (batcher_) {
    gauges.queue_rows = batcher_->waiting();
    gauges.queue_capacity = batcher_->settings().max_queue_size;
    gauges.inflight = batcher_->inflight();
    gauges.limit = batcher_->limit();
    gauges.expected_wait_us = batcher_->expected_wait_us();
  }
  if (supervisor_) {
    gauges.workers = supervisor_->pids();
    for (std::size_t i = 0; i < supervisor_->size(); ++i) {
      ++(supervisor_->live(i) ? gauges.live_workers : gauges.starting_workers);
    }
  }
  return gauges;
}

Answer Router::refuse(const Connection& connection, const Error& error) {
  const Head& head = connection.head();
  Answer answer = refusal(error);
  if (infers(head, segments_of(head.target))) metrics_.request(outcome_of(answer.status), 0);
  if (settings_.log) settings_.log(line_of({connection, head.request_id, answer.status, 0}));
  return answer;
}

}  // namespace mctl
