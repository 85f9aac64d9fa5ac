// The part of the router that reads, queues and answers inference requests.
#include <boost/beast/core/string.hpp>
#include <charconv>

#include "doors/access_log.h"
#include "doors/inflate.h"
#include "doors/oip_answer.h"
#include "doors/oip_request.h"
#include "doors/router.h"

namespace mctl {
namespace {

constexpr std::int64_t kLongestTimeout = 86'400'000;  // ms: a day

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

struct InferCall final : Call {
  InferCall(Router& owner, std::shared_ptr<Connection> client) : router(owner), connection(std::move(client)) {}
  void finished(const Error* error) override { router.done(*this, error); }

  Router& router;
  std::shared_ptr<Connection> connection;
  InferRequest request;
  std::string inflated;  // the body, if it came compressed
};

void Router::infer(const std::shared_ptr<Connection>& connection) {
  auto call = std::make_shared<InferCall>(*this, connection);
  call->arrival_ns = connection->begun().time_since_epoch() / std::chrono::nanoseconds(1);
  call->client = connection->client();
  connection->context = call;
  if (auto submitted = submit(call); !submitted) done(*call, &submitted.error());
}

Status Router::submit(const std::shared_ptr<InferCall>& call) {
  if (auto status = room(*call->connection); !status) return status;
  if (auto status = read(*call); !status) return status;
  if (auto status = bind(*call); !status) return status;
  if (batcher_) return batcher_->submit(call);
  answer_zeros(*call);
  return Done{};
}

// Asked before anything is parsed: under overload that is most of the work.
Status Router::room(const Connection& connection) const {
  if (auto status = available(); !status) return status;
  return batcher_ ? batcher_->admit(connection.client(), 1) : Done{};
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
    body = std::as_bytes(std::span(call.inflated));
  }
  auto request = parse_infer(manifest_.contract, body, head.json_length, settings_.max_request_rows);
  if (!request) return request.error();
  call.request = *std::move(request);
  std::int64_t timeout = settings_.default_timeout / std::chrono::nanoseconds(1);
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

// Holds the request to the contract.
Status Router::bind(InferCall& call) {
  const Contract& contract = manifest_.contract;
  std::vector<Given> given;
  for (const auto& input : call.request.inputs) given.push_back({input.name, input.dtype, input.shape, input.data});
  std::vector<std::size_t> order;
  const auto most = packing_.batch_dim() ? std::optional(settings_.max_request_rows) : std::nullopt;
  auto dims = check(contract, given, order, most);
  if (!dims) return dims.error();
  for (const auto& [name, value] : call.request.parameters) {
    if (auto same = check_constant(contract, name, value); !same) return same.error();
  }
  call.dims = *std::move(dims);
  call.rows = packing_.rows_of(call.dims);
  for (const std::size_t index : order) call.inputs.push_back(call.request.inputs[index].data);
  return packing_.possible(call.dims);
}

void Router::answer_zeros(InferCall& call) {
  for (const Tensor& output : manifest_.contract.outputs) {
    const std::size_t bytes = *bytes_of(output, call.dims);
    if (bytes > zeros_.size()) zeros_.resize(bytes);
    call.outputs.push_back({*shape_of(output, call.dims), {}});
  }
  for (std::size_t i = 0; i < call.outputs.size(); ++i) {
    call.outputs[i].data = std::span(zeros_).first(*bytes_of(manifest_.contract.outputs[i], call.dims));
  }
  done(call, nullptr);
}

bool Router::gone(Connection& connection) {
  const auto call = std::static_pointer_cast<InferCall>(connection.context.lock());
  if (!call || !batcher_ || !batcher_->cancel(*call)) return true;
  const std::int64_t total_ns = now_ns() - call->arrival_ns;
  metrics_.request(Outcome::cancelled, static_cast<std::uint64_t>(total_ns));
  if (settings_.log) {
    settings_.log(line_of({connection, connection.head().request_id, kClientWentAway, total_ns, call.get()}));
  }
  return false;
}

void Router::done(InferCall& call, const Error* error) {
  std::optional<Answer> answer;
  if (!error) {
    auto made = answer_infer(manifest_, call.request, call.outputs);
    answer = made ? *std::move(made) : refusal(made.error());
  } else {
    answer = refusal(*error);
  }
  const std::int64_t total_ns = now_ns() - call.arrival_ns;
  const std::string& asked = call.connection->head().request_id;
  const std::string id = asked.empty() ? hexadecimal(next_id_++) : asked;
  std::string& fields = answer->fields;
  (fields += "x-request-id: ") += id + "\r\n";
  append_ms(fields, "x-total-time", total_ns);
  if (call.batch_rows > 0) {
    append_ms(fields, "x-queue-time", call.queue_ns);
    append_ms(fields, "x-inference-time", call.compute_ns);
    fields += "x-mctl-batch-size: " + std::to_string(call.batch_rows) + "\r\nx-mctl-bucket: " + call.bucket +
              "\r\nx-mctl-variant: " + call.variant + "\r\n";
  }
  const bool gone = call.connection->gone();
  metrics_.request(gone ? Outcome::cancelled : outcome_of(answer->status), static_cast<std::uint64_t>(total_ns));
  if (settings_.log) {
    settings_.log(line_of({*call.connection, id, gone ? kClientWentAway : answer->status, total_ns, &call}));
  }
  call.connection->respond(*std::move(answer));
}

}  // namespace mctl
