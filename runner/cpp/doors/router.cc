#include "doors/router.h"

#include <algorithm>
#include <boost/asio/steady_timer.hpp>
#include <random>
#include <utility>
#include <vector>

#include "doors/access_log.h"
#include "doors/exposition.h"
#include "doors/metadata.h"
#include "doors/path.h"
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

std::int64_t age_of(const Connection& connection) {
  return now_ns() - connection.begun().time_since_epoch() / std::chrono::nanoseconds(1);
}

bool reads(const Head& head) { return head.verb == Verb::get || head.verb == Verb::head; }

// Extensions of Triton's that clients may ask for.
bool is_extension(std::span<const std::string> path) {
  const std::string& first = path.front();
  return first == "systemsharedmemory" || first == "cudasharedmemory" || first == "trace" || first == "logging";
}

bool is_model_extension(std::string_view name) {
  return name == "config" || name == "trace" || name == "generate" || name == "generate_stream" || name == "load" ||
         name == "unload";
}

// Any listener tells it.
bool is_index(std::span<const std::string> path) {
  return path.size() == 3 && path[0] == "v2" && path[1] == "repository" && path[2] == "index";
}

// Who answers what the management port is for.
enum class Managed { none, here, torchserve };
Managed owner_of(std::span<const std::string> path) {
  if (TorchServe::owns(path)) return Managed::torchserve;
  return Management::owns(path) && !is_index(path) ? Managed::here : Managed::none;
}

Answer elsewhere() {
  return refusal({Code::forbidden, "this is for the management port only: start the server with `--admin-port`"});
}

Counted counted_of(const ServedModel& model) {
  return {model.name(), model.version(), model.manifest(), model.metrics(), {}, nullptr, {}};
}

std::vector<Counted> counted(const std::vector<std::shared_ptr<ServedModel>>& models) {
  std::vector<Counted> all;
  for (const auto& model : models) all.push_back(counted_of(*model));
  return all;
}

ModelFinder finder_of(Fleet& fleet) {
  ModelFinder finder;
  finder.choose = [&fleet](std::string_view name, std::string_view version,
                           std::string_view key) -> Result<std::shared_ptr<ServedModel>> {
    const auto found = fleet.choose(name, version, key);
    if (!found) return found.error();
    return (*found)->shared_from_this();
  };
  finder.look = [&fleet](std::string_view name, std::string_view version) -> std::shared_ptr<ServedModel> {
    const auto found = fleet.find(name, version);
    return found ? (*found)->shared_from_this() : nullptr;
  };
  finder.all = [&fleet] { return fleet.models().all(); };
  return finder;
}

Listed listed_as(const ServedModel& model) {
  Listed listed{model.name(), model.version(), model.manifest(), model.max_request_rows(), {}};
  if (const ServedHandler* const handler = model.handler()) {
    listed.handler_paths = {"POST /predictions/" + model.name()};
    for (const HandlerRoute& route : handler->routes()) listed.handler_paths.push_back(route.method + " " + route.path);
  }
  return listed;
}

}  // namespace

Router::Router(Fleet& fleet, RouterSettings settings)
    : fleet_(fleet),
      settings_(std::move(settings)),
      events_(fleet.events()),
      handlers_(finder_of(fleet), {settings_.max_body, !settings_.token.empty(), settings_.log}),
      next_id_(static_cast<std::uint64_t>(std::random_device{}()) << 32) {
  if (!settings_.management) return;
  management_.emplace(fleet, *settings_.rollouts, *settings_.management);
  torchserve_.emplace(fleet, *settings_.management);
}

void Router::serve(const std::shared_ptr<Connection>& connection) {
  const Head& head = connection->head();
  if (auto permitted = permit(head); !permitted) return connection->respond(refuse(*connection, permitted.error()));
  if (!fleet_.has_on_demand() || !waits(connection)) dispatch(connection);
}

void Router::dispatch(const std::shared_ptr<Connection>& connection) {
  const Head& head = connection->head();
  if (const auto target = infers(head)) return infer(connection, *target);
  if (handlers_.concerns(head)) return handlers_.serve(connection, draining_);
  const auto path = segments_of(head.target);
  if (!manages(connection, path)) answer(*connection, route(head, path));
}

// A request that waits until its model is in memory.
struct Router::Waiting final : Exchange {
  Waiting(Router& owner, std::shared_ptr<Connection> from, boost::asio::any_io_executor where)
      : router(owner), connection(std::move(from)), timer(std::move(where)) {}

  bool gone() override {
    over();
    return false;
  }
  // It is answered in another way from now on.
  std::shared_ptr<Connection> over() {
    timer.cancel();
    return std::exchange(connection, nullptr);
  }

  Router& router;
  std::shared_ptr<Connection> connection;  // none: it is over
  boost::asio::steady_timer timer;
};

// The model that a request is for, if it is one that a model or its handler answers.
std::optional<Router::Target> Router::asks(const Head& head) const {
  if (auto target = infers(head)) return target;
  const auto path = segments_of(head.target);
  if (auto named = handler_path(path)) {
    const bool says = named->version.empty() && !named->rest.empty();
    return Target{named->name, says && fleet_.knows(named->name, named->rest[0]) ? named->rest[0] : named->version, {}};
  }
  return std::nullopt;
}

// For as long as it would wait in the model's queue.
std::chrono::nanoseconds Router::patience(const Head& head, const Target& target) const {
  constexpr std::uint64_t day = 86'400'000;
  if (head.timeout_ms) return std::chrono::milliseconds(std::clamp<std::uint64_t>(*head.timeout_ms, 1, day));
  const auto model = fleet_.find(target.name, target.version);
  return std::chrono::nanoseconds(model ? (*model)->default_timeout_ns() : 30'000'000'000);
}

bool Router::waits(const std::shared_ptr<Connection>& connection) {
  const auto target = asks(connection->head());
  if (!target) return false;
  const auto waiting = std::make_shared<Waiting>(*this, connection, connection->executor());
  const bool sleeps = fleet_.wake(target->name, target->version, [this, waiting] {
    const auto from = waiting->over();
    if (!from) return;
    const Status open = available();
    open ? dispatch(from) : answer(*from, refusal(open.error()));
  });
  if (!sleeps) return false;
  connection->context = waiting;
  waiting->timer.expires_at(connection->begun() + patience(connection->head(), *target));
  waiting->timer.async_wait([this, waiting](boost::system::error_code ec) {
    if (ec) return;
    if (const auto from = waiting->over())
      answer(*from, refusal({Code::deadline, "the model was not in memory, and did not get there in time"}));
  });
  return true;
}

// Management answers here, or says where it does.
bool Router::manages(const std::shared_ptr<Connection>& connection, Path path) {
  const Managed owner = owner_of(path);
  if (owner == Managed::none) return false;
  if (!management_) return answer(*connection, elsewhere()), true;
  if (listens(connection, path)) return true;
  const auto body = connection->body();
  const ManagementRequest request{connection->head(), path,
                                  std::string(reinterpret_cast<const char*>(body.data()), body.size())};
  const auto reply = [this, connection](Answer made) { answer(*connection, std::move(made)); };
  owner == Managed::torchserve ? torchserve_->serve(request, reply) : management_->serve(request, reply);
  return true;
}

// `GET /admin/v1/events` of a client that takes a stream. One that comes back says what it has seen.
bool Router::listens(const std::shared_ptr<Connection>& connection, Path path) {
  const Head& head = connection->head();
  const bool asked = path.size() == 3 && path[0] == "admin" && path[2] == "events" && head.verb == Verb::get &&
                     head.accept.find("text/event-stream") != std::string::npos;
  if (!asked) return false;
  const auto after = Management::events_seen(connection->head_text(), head.target);
  if (const Status open = after ? available() : Status(after.error()); !open) {
    answer(*connection, refusal(open.error()));
  } else {
    events_.begin(connection, *after);
  }
  return true;
}

void Router::drain() {
  draining_ = true;
  events_.end();
}

void Router::answer(Connection& connection, Answer answer) const {
  if (settings_.log)
    settings_.log(line_of({connection, connection.head().request_id, answer.status, age_of(connection)}));
  connection.respond(std::move(answer));
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
  const auto target = infers(head);
  const bool handled = !target && handlers_.concerns(head);
  if (!large && (target || handled)) return std::nullopt;  // serve() sees to it
  if (auto permitted = permit(head); !permitted) return refuse(connection, permitted.error());
  if (target) {
    const Status room = admits(*target, connection.client());
    return room ? std::nullopt : std::optional(refuse(connection, room.error()));
  }
  if (handled) {
    const Status open = available();
    if (const auto asked = asks(head); open && asked && fleet_.sleeps(asked->name, asked->version)) return std::nullopt;
    auto refused = open ? handlers_.screen(connection) : std::optional(refusal(open.error()));
    if (refused && settings_.log) settings_.log(line_of({connection, head.request_id, refused->status, 0}));
    return refused;
  }
  const auto path = segments_of(head.target);
  const auto owner = owner_of(path);
  if (owner != Managed::none && management_) return std::nullopt;
  Answer answer = owner == Managed::none ? route(head, path) : elsewhere();
  if (answer.status == 200 && is_index(path) && !large) return std::nullopt;
  if (answer.status == 200) answer = refusal({Code::too_large, "this path takes no body"});
  if (settings_.log) settings_.log(line_of({connection, head.request_id, answer.status, 0}));
  return answer;
}

Status Router::admits(const Target& target, Client client) const {
  if (auto status = available(); !status) return status;
  if (fleet_.sleeps(target.name, target.version)) return Done{};
  const auto model = fleet_.find(target.name, target.version);
  return model ? (*model)->admit(client, 1) : model.error();
}

// `/predictions/NAME` takes tensors where there is no handler.
std::optional<Router::Target> Router::infers(const Head& head) const {
  constexpr std::string_view before = "/v2/models/", after = "/infer";
  if (head.verb != Verb::post) return std::nullopt;
  const std::string_view target = head.target;
  if (target.size() > before.size() + after.size() && target.starts_with(before) && target.ends_with(after)) {
    const auto name = target.substr(before.size(), target.size() - before.size() - after.size());
    if (name.find_first_of("/%?") == name.npos) return Target{std::string(name), {}, {}};  // as nearly all write it
  }
  const auto path = segments_of(target);
  if (auto named = handler_path(path); named && path[0] == "predictions" && named->rest.size() <= 1) {
    Target asked{named->name, named->rest.empty() ? "" : named->rest[0], {}};
    const auto found = fleet_.find(asked.name, asked.version);
    return found && !(*found)->handler() ? std::optional(std::move(asked)) : std::nullopt;
  }
  if (path.size() < 4 || path[0] != "v2" || path[1] != "models") return std::nullopt;
  auto named = target_of(path);
  return named.rest.size() == 1 && named.rest[0] == "infer" ? std::optional(std::move(named)) : std::nullopt;
}

// A name is one segment, or those of an alias with slashes.
Router::Target Router::target_of(Path path) const {
  Target target{path[2], {}, {}};
  std::size_t at = 3;
  const auto& aliases = fleet_.desired().aliases;
  std::string longer = path[2];
  for (std::size_t end = 3; end < path.size() && !aliases.empty(); ++end) {
    longer += '/' + path[end];
    if (!aliases.contains(longer)) continue;
    target.name = longer;
    at = end + 1;
  }
  if (path.size() >= at + 2 && path[at] == "versions") {
    target.version = path[at + 1];
    at += 2;
  }
  target.rest.assign(path.begin() + static_cast<std::ptrdiff_t>(at), path.end());
  return target;
}

Answer Router::route(const Head& head, Path path) const {
  const std::size_t depth = path.size();
  if (depth == 0) return reads(head) ? page(head) : wrong_verb(kRead);
  if (depth == 1 && path[0] == "metrics") {
    return reads(head) ? with_body(prometheus(with_gauges()), "text/plain; version=0.0.4; charset=utf-8")
                       : wrong_verb(kRead);
  }
  if (depth == 1 && path[0] == "ping")  // TorchServe's
    return reads(head) ? with_body(fleet_.ready() ? R"({"status":"Healthy"})" : R"({"status":"Unhealthy"})")
                       : wrong_verb(kRead);
  if (path[0] != "v2") return no_such_path();
  if (depth == 1) return reads(head) ? with_body(server_metadata()) : wrong_verb(kRead);
  if (path[1] == "health" && depth == 3) {
    if (path[2] == "live") return reads(head) ? with_body("{\"live\":true}") : wrong_verb(kRead);
    if (path[2] == "ready") return reads(head) ? health() : wrong_verb(kRead);
  }
  if (path[1] == "models" && depth == 3 && path[2] == "stats" && fleet_.models().versions("stats").empty()) {
    return reads(head) ? with_body(statistics(counted(fleet_.models().all()))) : wrong_verb(kRead);
  }
  if (path[1] == "models" && depth >= 3) return model(head, path);
  if (path[1] == "repository" && depth == 3 && path[2] == "index")
    return head.verb == Verb::post ? with_body(repository_index(fleet_, false)) : wrong_verb("POST");
  if (is_extension(path.subspan(1))) return refusal({Code::unimplemented, "this extension is not implemented"});
  return no_such_path();
}

Answer Router::model(const Head& head, Path path) const {
  const Target target = target_of(path);
  const Path rest = target.rest;
  const auto found = fleet_.find(target.name, target.version);
  if (!found) return refusal(found.error());
  const ServedModel& model = **found;
  if (rest.empty()) return reads(head) ? metadata(model) : wrong_verb(kRead);
  if (rest.size() == 1 && rest[0] == "infer") return wrong_verb("POST");
  if (rest.size() == 1 && rest[0] == "stats") {
    if (!reads(head)) return wrong_verb(kRead);
    const Counted one[] = {counted_of(model)};
    return with_body(target.version.empty() ? statistics(counted(fleet_.models().versions(model.name())))
                                            : statistics(one));
  }
  if (rest.size() == 1 && rest[0] == "ready") {
    if (!reads(head)) return wrong_verb(kRead);
    if (auto status = available(); !status) return refusal(status.error());
    if (auto status = fleet_.ready(target.name, target.version); !status) return refusal(status.error());
    std::string body = "{\"name\":";
    append_json_string(body, model.name());
    return with_body(body + ",\"ready\":true}");
  }
  if (is_model_extension(rest[0])) return refusal({Code::unimplemented, "this extension is not implemented"});
  return no_such_path();
}

Answer Router::metadata(const ServedModel& model) const {
  std::vector<std::string> versions;
  for (const auto& version : fleet_.known())
    if (version->name() == model.name()) versions.push_back(version->version());
  return with_body(model_metadata(listed_as(model), versions));
}

std::vector<Counted> Router::with_gauges() const {
  const auto models = fleet_.models().all();
  std::vector<Counted> all = counted(models);
  for (std::size_t i = 0; i < all.size(); ++i) {
    all[i].gauges = models[i]->gauges();
    all[i].gauges.ready = all[i].gauges.ready && !draining_;
    if (const ServedHandler* const handler = models[i]->handler()) {
      all[i].handler = &handler->metrics();
      all[i].handler_gauges = handler->gauges();
    }
  }
  return all;
}

Status Router::available() const {
  if (draining_) return Error{Code::unavailable, "draining: the server is going away"};
  return Done{};
}

Answer Router::health() const {
  const Status status = draining_ ? available() : fleet_.ready();
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
  for (const auto& model : fleet_.known()) listed.push_back(listed_as(*model));
  return with_body(front_page(listed, url_, !settings_.token.empty(), json),
                   json ? "application/json" : "text/plain; charset=utf-8");
}

Answer Router::refuse(const Connection& connection, const Error& error) {
  const Head& head = connection.head();
  Answer answer = refusal(error);
  if (const auto target = infers(head))
    if (const auto model = fleet_.find(target->name, target->version))
      (*model)->metrics().request(outcome_of(error.code), 0);
  if (settings_.log) settings_.log(line_of({connection, head.request_id, answer.status, 0}));
  return answer;
}

}  // namespace mctl
