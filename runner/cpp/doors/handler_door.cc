#include "doors/handler_door.h"

#include <algorithm>
#include <boost/beast/core/string.hpp>
#include <boost/json.hpp>
#include <charconv>
#include <limits>
#include <new>
#include <random>

#include "doors/access_log.h"
#include "doors/inflate.h"
#include "format/json.h"
#include "format/text.h"

namespace mctl {
namespace {

constexpr std::int64_t kLongestTimeout = 86'400'000;     // ms: a day
constexpr int kMostDepth = 8;                            // of handlers that ask servers that ask handlers
constexpr std::string_view kTakes = "this path takes ";  // verbs, as the Allow line has them
constexpr std::size_t kMostRead = 1 << 20;               // bytes of a body in which a model's name is looked for

std::string hexadecimal(std::uint64_t value) {
  char text[16];
  return {text, std::to_chars(text, text + sizeof text, value, 16).ptr};
}

// The first word of a request's head.
std::string_view verb_of(std::string_view head) { return head.substr(0, head.find(' ')); }

std::string_view value_of(const HeaderLines& lines, std::string_view name) {
  const auto found = std::ranges::find(lines, name, &HeaderLines::value_type::first);
  return found == lines.end() ? std::string_view() : std::string_view(found->second);
}

bool is_openai(std::string_view target) { return target.starts_with("/v1/"); }

std::string_view kind_of(unsigned status) { return status < 500 ? "invalid_request_error" : "server_error"; }

// On `/v1` paths clients of OpenAI's interface read errors.
Answer refusal_for(std::string_view target, const Error& error) {
  Answer answer = refusal(error);
  if (error.code == Code::method) answer.fields = "Allow: " + error.text.substr(kTakes.size()) + "\r\n";
  if (!is_openai(target)) return answer;
  answer.body = "{\"error\":{\"message\":";
  append_json_string(answer.body, error.text);
  answer.body += ",\"type\":\"" + std::string(kind_of(answer.status)) +
                 "\",\"param\":null,\"code\":" + (error.code == Code::not_found ? "\"model_not_found\"" : "null") +
                 "}}";
  return answer;
}

Outcome outcome_of(unsigned status) {
  if (status < 400) return Outcome::ok;
  if (status < 500) return Outcome::invalid;
  return status == 503 ? Outcome::rejected : status == 504 ? Outcome::expired : Outcome::error;
}

// What a client may leave out of its headers before a handler sees them.
bool is_seen(std::string_view name, bool has_token) {
  if (name == "authorization") return !has_token;
  for (const std::string_view hidden : {"connection", "content-encoding", "content-length", "expect", "keep-alive",
                                        "te", "trailer", "transfer-encoding", "upgrade"}) {
    if (name == hidden) return false;
  }
  return true;
}

Result<std::int64_t> timeout_of(const Head& head, std::int64_t otherwise_ns) {
  if (!head.timeout_ms) return otherwise_ns;
  if (*head.timeout_ms < 1 || *head.timeout_ms > kLongestTimeout) {
    return Error{Code::invalid, "x-mctl-timeout-ms is no number in 1.." + std::to_string(kLongestTimeout)};
  }
  return static_cast<std::int64_t>(*head.timeout_ms) * 1'000'000;
}

Result<int> depth_of(const HeaderLines& lines) {
  const std::string_view text = value_of(lines, "x-mctl-depth");
  int depth = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), depth);
  if (!text.empty() && (error != std::errc{} || end != text.data() + text.size() || depth < 0)) {
    return Error{Code::invalid, "x-mctl-depth is no number"};
  }
  if (depth <= kMostDepth) return depth;
  return Error{Code::invalid, "handlers ask one another more than " + std::to_string(kMostDepth) + " deep"};
}

// The answer without its body. Code::model: it cannot be sent.
Result<Answer> head_from(const HandlerAnswer& from) {
  std::string type = "application/octet-stream";
  auto fields = fields_from(from.headers, type);
  if (!fields) return fields.error();
  Answer answer;
  answer.status = from.status;
  answer.type = {};
  answer.fields = "Content-Type: " + type + "\r\n" + *fields;
  return answer;
}

// The field `model` of a JSON body.
std::string model_in(std::span<const std::byte> body) {
  if (body.size() > kMostRead) return {};
  const auto value = parse_json({reinterpret_cast<const char*>(body.data()), body.size()});
  if (!value || !value->is_object()) return {};
  const auto* name = value->get_object().if_contains("model");
  return name != nullptr && name->is_string() ? std::string(name->get_string()) : std::string();
}

Error no_handler(const ServedModel& model) {
  return {Code::not_found, "model '" + model.name() + "' has no handler: POST tensors to /v2/models/" + model.name() +
                               "/infer, or serve it with `--handler`"};
}

Error takes_only(const std::string& allowed) { return {Code::method, std::string(kTakes) + allowed}; }

}  // namespace

// One request for a handler, from its connection and back.
struct HandlerExchange final : HandlerTask, Exchange {
  HandlerExchange(const HandlerDoor& owner, std::shared_ptr<ServedModel> served, std::shared_ptr<Connection> from)
      : door(owner), model(std::move(served)), connection(std::move(from)) {}

  void answered(HandlerAnswer& answer, Bytes body) override;
  void failed(const Error& error) override;
  void begun(StreamStart& start) override;
  void part(Bytes bytes) override { connection->send_part(bytes); }
  void ended(const Error* error) override;
  bool gone() override;
  void taken() override { model->handler()->taken(*this); }
  std::string own_fields() const { return "x-request-id: " + id + "\r\nx-mctl-version: " + model->version() + "\r\n"; }

  const HandlerDoor& door;
  const std::shared_ptr<ServedModel> model;
  const std::shared_ptr<Connection> connection;
  HeaderLines lines;
  std::string method, path, query, address, id;
  Buffer inflated;  // the body, if it came compressed
  unsigned status = 200;
};

HandlerDoor::HandlerDoor(ModelFinder models, Settings settings)
    : models_(std::move(models)),
      settings_(std::move(settings)),
      next_id_(static_cast<std::uint64_t>(std::random_device{}()) << 32) {}

// --- whose request it is

HandlerDoor::Models HandlerDoor::with_route(std::span<const std::string> path) const {
  Models found;
  for (auto& model : models_.all()) {
    if (!model->handler() || !match(model->handler()->routes(), {}, path).path) continue;
    const bool again = std::ranges::any_of(found, [&](const auto& other) { return other->name() == model->name(); });
    if (!again) found.push_back(std::move(model));
  }
  return found;
}

bool HandlerDoor::concerns(const Head& head) const {
  const auto path = segments_of(head.target);
  return handler_path(path) || (!path.empty() && !with_route(path).empty());
}

Result<std::shared_ptr<ServedModel>> HandlerDoor::owner_of(const Connection& connection, bool counts) const {
  const auto path = segments_of(connection.head().target);
  if (auto known = handler_path(path)) return named(connection, *std::move(known), counts);
  return by_route(connection, path, counts);
}

Result<std::shared_ptr<ServedModel>> HandlerDoor::named(const Connection& connection, HandlerPath path,
                                                        bool counts) const {
  if (path.version.empty() && !path.rest.empty() && models_.look(path.name, path.rest.front())) {
    path.version = path.rest.front();
    path.rest.erase(path.rest.begin());
  }
  const auto lines = lines_of(connection.head_text());
  const std::string_view any_key = "one that has no turn";
  auto model = models_.choose(path.name, path.version, counts ? value_of(lines, "x-mctl-key") : any_key);
  if (!model) return model;
  const std::string_view verb = verb_of(connection.head_text());
  if (path.rest.empty() && verb != "POST") return takes_only("POST");
  if (!(*model)->handler()) return no_handler(**model);
  if (path.rest.empty()) return model;
  const auto found = match((*model)->handler()->routes(), verb, path.rest);
  if (found.verb) return model;
  return found.path ? takes_only(found.allowed)
                    : Error{Code::not_found, "the handler of model '" + path.name + "' has no such route"};
}

Result<std::shared_ptr<ServedModel>> HandlerDoor::by_route(const Connection& connection,
                                                           std::span<const std::string> path, bool counts) const {
  Models sharing = with_route(path);
  if (sharing.empty()) return Error{Code::not_found, "no such path: GET / lists them"};
  auto model = sharing.front();
  std::string name = model->name();
  if (sharing.size() > 1) name = counts ? model_in(connection.body()) : "";  // the body may not be there yet
  const auto found = std::ranges::find_if(sharing, [&](const auto& each) { return each->name() == name; });
  if (found == sharing.end() && counts) {
    return Error{Code::not_found, "the body names no model that has this path: '" + printable(name) + "'"};
  }
  if (found != sharing.end()) model = *found;
  const auto met = match(model->handler()->routes(), verb_of(connection.head_text()), path);
  if (!met.verb) return takes_only(met.allowed);
  if (!counts) return model;
  const auto lines = lines_of(connection.head_text());
  return models_.choose(model->name(), {}, value_of(lines, "x-mctl-key"));
}

Status HandlerDoor::check_routes(const ServedModel& model) const {
  for (const HandlerRoute& route : model.handler()->routes()) {
    if (auto sound = check_route(route); !sound) return sound;
    if (is_shared(route)) continue;
    for (const auto& other : models_.all()) {
      if (!other->handler() || other->name() == model.name()) continue;
      for (const HandlerRoute& taken : other->handler()->routes()) {
        if (!overlap(route, taken)) continue;
        return Error{Code::usage, "the route `" + route.method + " " + route.path + "` is that of both '" +
                                      other->name() + "' and '" + model.name() + "': change one, or serve them apart"};
      }
    }
  }
  return Done{};
}

// --- a request comes

std::optional<Answer> HandlerDoor::screen(const Connection& connection) const {
  const auto model = owner_of(connection, false);
  const Status fine = model ? (*model)->handler()->admit(connection.client()) : Status(model.error());
  if (fine) return std::nullopt;
  return refusal_for(connection.head().target, fine.error());
}

void HandlerDoor::serve(const std::shared_ptr<Connection>& connection, bool drains) {
  const Head& head = connection->head();
  auto model = owner_of(*connection, true);
  if (!model) {
    Answer answer = refusal_for(head.target, model.error());
    if (settings_.log) settings_.log(line_of({*connection, head.request_id, answer.status, 0}));
    return connection->respond(std::move(answer));
  }
  const auto exchange = std::make_shared<HandlerExchange>(*this, *std::move(model), connection);
  exchange->id = head.request_id.empty() ? hexadecimal(next_id_++) : head.request_id;
  exchange->arrival_ns = connection->begun().time_since_epoch() / std::chrono::nanoseconds(1);
  exchange->client = connection->client();
  connection->context = exchange;
  Status submitted = drains ? Status(Error{Code::unavailable, "draining: the server is going away"}) : submit(exchange);
  if (!submitted) exchange->failed(submitted.error());
}

Status HandlerDoor::submit(const std::shared_ptr<HandlerExchange>& exchange) {
  const ServedModel& model = *exchange->model;
  if (auto status = model.handler()->admit(exchange->client); !status) return status;
  if (auto status = read(*exchange); !status) return status;
  return model.handler()->submit(exchange);
}

Status HandlerDoor::read(HandlerExchange& exchange) const {
  Connection& connection = *exchange.connection;
  const Head& head = connection.head();
  exchange.body = connection.body();
  if (!head.content_encoding.empty() && !boost::beast::iequals(head.content_encoding, "identity")) {
    auto inflated = inflate(head.content_encoding, exchange.body, settings_.max_body);
    if (!inflated) return inflated.error();
    exchange.inflated = *std::move(inflated);
    exchange.body = exchange.inflated.bytes();
    if (!connection.hold(exchange.body.size())) {
      return Error{Code::unavailable, "the server holds as much for its clients as it may: try again later"};
    }
  }
  exchange.lines = lines_of(connection.head_text());
  const auto timeout = timeout_of(head, exchange.model->default_timeout_ns());
  if (!timeout) return timeout.error();
  exchange.deadline_ns = exchange.arrival_ns + *timeout;
  exchange.deadline_stated = head.timeout_ms.has_value();
  const auto depth = depth_of(exchange.lines);
  if (!depth) return depth.error();
  exchange.method = verb_of(connection.head_text());
  const std::size_t mark = std::min(head.target.find('?'), head.target.size());
  exchange.path = head.target.substr(0, mark);
  if (mark < head.target.size()) exchange.query = head.target.substr(mark + 1);
  exchange.address = connection.address();
  HandlerRequest& request = exchange.request;
  request.traceparent = value_of(exchange.lines, "traceparent");
  request.key = value_of(exchange.lines, "x-mctl-key");
  std::erase_if(exchange.lines, [&](const auto& line) { return !is_seen(line.first, settings_.has_token); });
  request.method = exchange.method;
  request.path = exchange.path;
  request.query = exchange.query;
  request.headers = exchange.lines;
  request.client = exchange.address;
  request.request_id = exchange.id;
  request.depth = *depth;
  return Done{};
}

// --- and is answered

void HandlerDoor::close_books(HandlerExchange& exchange, unsigned status, Outcome outcome) const {
  const std::int64_t total_ns = now_ns() - exchange.arrival_ns;
  exchange.model->handler()->metrics().request(outcome, static_cast<std::uint64_t>(total_ns));
  if (settings_.log) settings_.log(line_of({*exchange.connection, exchange.id, status, total_ns}));
}

void HandlerDoor::respond(HandlerExchange& exchange, Answer answer, Outcome outcome) const {
  answer.fields += exchange.own_fields();
  close_books(exchange, answer.status, outcome);
  exchange.connection->respond(std::move(answer));
}

void HandlerExchange::answered(HandlerAnswer& from, Bytes bytes) {
  auto made = head_from(from);
  if (!made) return failed(made.error());
  if (!has_no_body(made->status)) made->body.assign(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  const Outcome outcome = outcome_of(made->status);
  door.respond(*this, *std::move(made), outcome);
}

void HandlerExchange::failed(const Error& error) {
  door.respond(*this, refusal_for(connection->head().target, error), mctl::outcome_of(error.code));
}

void HandlerExchange::begun(StreamStart& start) {
  auto made = head_from(start);
  if (!made) {
    model->handler()->cancel(*this);
    return failed(made.error());
  }
  status = made->status;
  made->fields += own_fields();
  connection->begin_stream(*std::move(made));
}

void HandlerExchange::ended(const Error* error) {
  door.close_books(*this, status, error ? mctl::outcome_of(error->code) : Outcome::ok);
  connection->end_stream(error == nullptr);
}

bool HandlerExchange::gone() {
  model->handler()->cancel(*this);
  door.close_books(*this, kClientWentAway, Outcome::cancelled);
  return false;
}

// --- handlers call models

namespace {

struct HandlerModelCall final : Call {
  HandlerModelCall(std::shared_ptr<ServedModel> from, std::shared_ptr<ServedModel> to, const CallOrigin& place)
      : owner(std::move(from)), model(std::move(to)), origin(place) {}

  void finished(const Error* error) override {
    const std::int64_t total_ns = now_ns() - arrival_ns;
    const Outcome outcome = cancelled ? Outcome::cancelled : error ? mctl::outcome_of(error->code) : Outcome::ok;
    model->metrics().request(outcome, static_cast<std::uint64_t>(total_ns));
    if (error) return owner->handler()->refuse(origin, status_of(error->code), error->text);
    std::vector<std::vector<std::int64_t>> shapes;
    std::vector<Bytes> bytes;
    for (const OutputView& output : outputs) {
      shapes.push_back(output.shape);
      bytes.push_back(output.data);
    }
    const CallResult result{origin.id, origin.call, model->name(), model->version(), model->contract().outputs, shapes};
    owner->handler()->result(origin, header_of(result), bytes);
  }

  const std::shared_ptr<ServedModel> owner, model;
  const CallOrigin origin;
  std::vector<std::byte> bytes;  // of all tensors
};

Status check_booleans(const HandlerTensor& tensor) {
  if (tensor.dtype != Dtype::boolean) return Done{};
  if (std::ranges::all_of(tensor.data, [](std::byte b) { return b <= std::byte{1}; })) return Done{};
  return Error{Code::invalid, "input '" + tensor.name + "' has booleans that are neither 0 nor 1"};
}

// The tensors' bytes become the call's, then they are held to the contract.
Status bind(HandlerModelCall& call, const HandlerCall& from) {
  std::size_t size = 0;
  for (const HandlerTensor& tensor : from.inputs) size += tensor.data.size();
  call.bytes.reserve(size);
  std::vector<Given> given;
  for (const HandlerTensor& tensor : from.inputs) {
    if (auto sound = check_booleans(tensor); !sound) return sound;
    const std::size_t at = call.bytes.size();
    call.bytes.insert(call.bytes.end(), tensor.data.begin(), tensor.data.end());
    given.push_back({tensor.name, tensor.dtype, tensor.shape, Bytes(call.bytes).subspan(at)});
  }
  return call.model->bind(call, given);
}

std::int64_t deadline_of(const HandlerCall& from, const Caller& caller, std::int64_t now) {
  if (!from.timeout_ms) return caller.deadline_ns;
  return std::min(caller.deadline_ns, now + *from.timeout_ms * 1'000'000);
}

}  // namespace

ServedHandler::Cancel HandlerDoor::called(ServedModel& owner, const CallOrigin& origin, HandlerCall& from,
                                          const Caller& caller) {
  const auto refuse = [&](const Error& error) {
    owner.handler()->refuse(origin, status_of(error.code), error.text);
    return ServedHandler::Cancel();
  };
  auto model = owner.shared_from_this();
  if (!from.model.empty()) {
    auto found = models_.choose(from.model, from.version, caller.key);
    if (!found) return refuse(found.error());
    model = *std::move(found);
  }
  const auto call = std::make_shared<HandlerModelCall>(owner.shared_from_this(), model, origin);
  call->arrival_ns = now_ns();
  call->deadline_ns = deadline_of(from, caller, call->arrival_ns);
  call->deadline_stated = from.timeout_ms || caller.deadline_stated;
  call->client = caller.client;
  Status done = model->admit(call->client, 1);
  if (done) done = bind(*call, from);
  if (done) done = model->submit(call);
  if (!done) {
    call->finished(&done.error());
    return {};
  }
  return [call] { call->model->cancel(*call); };
}

}  // namespace mctl
