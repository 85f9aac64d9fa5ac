// The part of the router that reads, queues and answers inference requests.
#include <boost/beast/core/string.hpp>
#include <charconv>
#include <new>

#include "doors/access_log.h"
#include "doors/inflate.h"
#include "doors/named_tensors.h"
#include "doors/oip_answer.h"
#include "doors/oip_request.h"
#include "doors/router.h"
#include "doors/shadow.h"

namespace mctl {
namespace {

constexpr std::int64_t kLongestTimeout = 86'400'000;  // ms: a day
constexpr std::size_t kCopied = 64 << 10;             // bytes of tensors that are copied rather than kept in their body

// `application/json; charset=utf-8` is JSON. No type at all is what many clients of binary tensors send, and that of a
// form is what `curl -d` says of any body.
bool understood(std::string_view type) {
  type = type.substr(0, type.find(';'));
  while (type.ends_with(' ')) type.remove_suffix(1);
  for (const std::string_view known :
       {"", "application/json", "application/octet-stream", "text/json", "application/x-www-form-urlencoded"}) {
    if (boost::beast::iequals(type, known)) return true;
  }
  return type.ends_with("+json");
}

void append_ms(std::string& out, std::string_view name, std::int64_t ns) {
  char text[32];
  const auto end = std::to_chars(text, text + sizeof text, static_cast<double>(ns) * 1e-6, std::chars_format::fixed, 3);
  (out += name) += ": ";
  out.append(text, end.ptr) += "\r\n";
}

std::string hexadecimal(std::uint64_t value) {
  char text[16];
  return {text, std::to_chars(text, text + sizeof text, value, 16).ptr};
}

}  // namespace

struct InferCall final : Call, Exchange {
  InferCall(Router& owner, std::shared_ptr<ServedModel> served, std::shared_ptr<Connection> from)
      : router(owner), model(std::move(served)), connection(std::move(from)) {}
  void finished(const Error* error) override { router.done(*this, error); }
  bool gone() override { return router.gone(*this); }

  Router& router;
  const std::shared_ptr<ServedModel> model;
  const std::shared_ptr<Connection> connection;
  InferRequest request;
  bool by_name = false;              // tensors are plain JSON, there and back
  Buffer inflated;                   // the body, if it came compressed and tensors lie in it
  std::shared_ptr<const void> body;  // the same, if it came as it is and they are large
};

void Router::infer(const std::shared_ptr<Connection>& connection, const Target& target) {
  const auto model = fleet_.choose(target.name, target.version, connection->head().key);
  if (!model) {
    const Status open = available();
    return answer(*connection, refusal(open ? model.error() : open.error()));
  }
  auto call = std::make_shared<InferCall>(*this, (*model)->shared_from_this(), connection);
  call->arrival_ns = connection->begun().time_since_epoch() / std::chrono::nanoseconds(1);
  call->client = connection->client();
  call->by_name = connection->head().target.starts_with("/predictions/");
  connection->context = call;
  if (auto submitted = submit(call); !submitted) done(*call, &submitted.error());
}

// The queue is asked for room before anything is parsed: under overload that is most of the work.
Status Router::submit(const std::shared_ptr<InferCall>& call) {
  if (auto status = available(); !status) return status;
  if (auto status = call->model->admit(call->client, 1); !status) return status;
  if (auto status = read(*call); !status) return status;
  return call->model->submit(call);
}

Status Router::read(InferCall& call) {
  const Head& head = call.connection->head();
  if (!understood(head.content_type)) {
    return Error{Code::unsupported, "Content-Type '" + head.content_type + "' is not understood: application/json"};
  }
  std::span<const std::byte> body = call.connection->body();
  if (!head.content_encoding.empty() && !boost::beast::iequals(head.content_encoding, "identity")) {
    auto inflated = inflate(head.content_encoding, body, settings_.max_body);
    if (!inflated) return inflated.error();
    call.inflated = *std::move(inflated);
    body = call.inflated.bytes();
  }
  const Contract& contract = call.model->contract();
  std::string rewritten;
  if (call.by_name) {
    auto made = infer_body_from(contract, {reinterpret_cast<const char*>(body.data()), body.size()});
    if (!made) return made.error();
    rewritten = *std::move(made);
    body = std::as_bytes(std::span(rewritten));
  }
  const auto json_length = call.by_name ? std::nullopt : head.json_length;
  auto request = parse_infer(contract, body, json_length, call.model->max_request_rows());
  if (!request) return request.error();
  call.request = *std::move(request);
  for (const auto& [name, value] : call.request.parameters) {
    if (auto same = check_constant(contract, name, value); !same) return same.error();
  }
  if (auto status = set_deadline(call); !status) return status;
  own(call);
  if (auto status = hold(call); !status) return status;
  std::vector<Given> given;
  for (const auto& input : call.request.inputs) given.push_back({input.name, input.dtype, input.shape, input.data});
  return call.model->bind(call, given);
}

Status Router::set_deadline(InferCall& call) const {
  const Head& head = call.connection->head();
  std::int64_t timeout = call.model->default_timeout_ns();
  call.deadline_stated = call.request.timeout_us || head.timeout_ms;
  if (call.request.timeout_us) timeout = std::min(*call.request.timeout_us, kLongestTimeout * 1000) * 1000;
  if (head.timeout_ms) {
    if (*head.timeout_ms < 1 || *head.timeout_ms > kLongestTimeout) {
      return Error{Code::invalid, "x-mctl-timeout-ms is no number in 1.." + std::to_string(kLongestTimeout)};
    }
    timeout = static_cast<std::int64_t>(*head.timeout_ms) * 1'000'000;
  }
  call.deadline_ns = call.arrival_ns + timeout;
  return Done{};
}

// What the call needs stays with it: the connection's buffer is for the next request. Small tensors are copied, of
// large ones the whole body is taken.
void Router::own(InferCall& call) const {
  std::size_t bytes = 0;
  for (const auto& input : call.request.inputs) bytes += input.parsed.empty() ? input.data.size() : 0;
  if (call.inflated.size() > 0 && bytes > 0) return;
  call.inflated = {};
  if (bytes > kCopied) {
    call.body = call.connection->take_body();
    return;
  }
  for (auto& input : call.request.inputs) {
    if (!input.parsed.empty()) continue;
    input.parsed.assign(input.data.begin(), input.data.end());
    input.data = input.parsed;
  }
}

// Counts what the call keeps beside the connection's buffer.
Status Router::hold(InferCall& call) const {
  std::size_t bytes = call.inflated.size();
  for (const auto& input : call.request.inputs) bytes += input.parsed.capacity();
  if (call.connection->hold(bytes)) return Done{};
  return Error{Code::unavailable, "the server holds as much for its clients as it may: try again later"};
}

// True if it runs already.
bool Router::gone(InferCall& call) {
  if (!call.model->cancel(call)) return true;
  const std::int64_t total_ns = now_ns() - call.arrival_ns;
  call.model->metrics().request(Outcome::cancelled, static_cast<std::uint64_t>(total_ns));
  if (settings_.log) {
    const std::string& id = call.connection->head().request_id;
    settings_.log(line_of({*call.connection, id, kClientWentAway, total_ns, &call}));
  }
  return false;
}

namespace {

// The engine goes on whatever there is no memory for.
Result<Answer> answer_of(const InferCall& call) {
  try {
    const ServedModel& model = *call.model;
    if (call.by_name) return answer_by_name(model.contract(), call.outputs);
    return answer_infer(model.name(), model.version(), model.contract(), call.request, call.outputs);
  } catch (const std::bad_alloc&) {
    return Error{Code::unavailable, "the server is out of memory"};
  }
}

}  // namespace

void Router::done(InferCall& call, const Error* error) {
  Result<Answer> made = error ? Result<Answer>(*error) : answer_of(call);
  Answer answer = made ? *std::move(made) : refusal(made.error());
  const std::int64_t total_ns = now_ns() - call.arrival_ns;
  const std::string& asked = call.connection->head().request_id;
  const std::string id = asked.empty() ? hexadecimal(next_id_++) : asked;
  std::string& fields = answer.fields;
  (fields += "x-request-id: ") += id + "\r\n";
  (fields += "x-mctl-version: ") += call.model->version() + "\r\n";
  append_ms(fields, "x-total-time", total_ns);
  if (call.batch_rows > 0) {
    append_ms(fields, "x-queue-time", call.queue_ns);
    append_ms(fields, "x-inference-time", call.compute_ns);
    fields += "x-mctl-batch-size: " + std::to_string(call.batch_rows) + "\r\nx-mctl-bucket: " + call.bucket +
              "\r\nx-mctl-variant: " + call.variant + "\r\n";
  }
  const Outcome outcome = call.cancelled ? Outcome::cancelled : made ? Outcome::ok : outcome_of(made.error().code);
  call.model->metrics().request(outcome, static_cast<std::uint64_t>(total_ns));
  if (settings_.log) {
    settings_.log(line_of({*call.connection, id, call.cancelled ? kClientWentAway : answer.status, total_ns, &call}));
  }
  call.connection->respond(std::move(answer));
  if (outcome != Outcome::ok) return;
  if (ServedModel* const other = fleet_.shadow_for(*call.model))
    shadow(*other, *call.model, call.request, call.outputs, id);
}

}  // namespace mctl
