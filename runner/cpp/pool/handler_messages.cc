#include "pool/handler_messages.h"

#include <algorithm>
#include <cmath>

#include "format/json.h"
#include "format/text.h"

namespace mctl {
namespace {

namespace json = boost::json;

constexpr std::size_t kMostDepth = 8;
constexpr double kLongestTimeout = 86'400'000;  // ms: a day
constexpr std::size_t kMostTensors = 1024, kMostAxes = 64, kMostRoutes = 1024, kMostLines = 1024;

// A JSON object, field by field.
class Header {
 public:
  explicit Header(std::string_view type) { text("t", type); }

  Header& text(std::string_view name, std::string_view value) {
    begin(name);
    append_json_string(out_, value);
    return *this;
  }
  Header& number(std::string_view name, std::uint64_t value) { return raw(name, std::to_string(value)); }
  Header& number(std::string_view name, std::int64_t value) { return raw(name, std::to_string(value)); }
  Header& raw(std::string_view name, std::string_view value) {
    begin(name);
    out_ += value;
    return *this;
  }
  std::string done() { return std::move(out_) + '}'; }

 private:
  void begin(std::string_view name) {
    out_ += out_.empty() ? '{' : ',';
    ((out_ += '"') += name) += "\":";
  }
  std::string out_;
};

std::string text_of_lines(std::span<const std::pair<std::string, std::string>> lines) {
  std::string out = "[";
  for (const auto& [name, value] : lines) {
    out += out.size() > 1 ? ",[" : "[";
    append_json_string(out, name);
    out += ',';
    append_json_string(out, value);
    out += ']';
  }
  return out + ']';
}

std::string text_of_tensors(std::span<const Tensor> tensors, std::span<const std::vector<std::int64_t>> shapes) {
  std::string out = "[";
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    out += i > 0 ? ",{\"name\":" : "{\"name\":";
    append_json_string(out, tensors[i].name);
    ((out += ",\"dtype\":\"") += oip_name_of(tensors[i].dtype)) += "\",\"shape\":[";
    for (std::size_t axis = 0; axis < shapes[i].size(); ++axis) {
      if (axis > 0) out += ',';
      out += std::to_string(shapes[i][axis]);
    }
    out += "]}";
  }
  return out + ']';
}

std::string header_with_id(std::string_view type, std::uint64_t id) { return Header(type).number("id", id).done(); }

// --- reading

std::uint64_t natural(Fields& fields, std::string_view name, std::string& fault) {
  const std::int64_t value = fields.integer(name);
  if (value < 0 && fault.empty()) fault = std::string(name) + " is negative";
  return static_cast<std::uint64_t>(value);
}

// The pairs of text that a list has.
std::vector<std::pair<std::string, std::string>> pairs_of(const json::value* value, const std::string& where,
                                                          std::size_t most, std::string& fault) {
  std::vector<std::pair<std::string, std::string>> pairs;
  const auto* list = value != nullptr ? value->if_array() : nullptr;
  if (value != nullptr && (list == nullptr || list->size() > most)) fault = where + " is no list, or too long";
  if (list == nullptr || !fault.empty()) return pairs;
  for (const auto& item : *list) {
    auto both = texts_of(item, where, fault);
    if (both.size() != 2 && fault.empty()) fault = where + " has something that is no pair";
    if (!fault.empty()) break;
    pairs.emplace_back(std::move(both[0]), std::move(both[1]));
  }
  return pairs;
}

HandlerReady ready_from(Fields& fields, std::string& fault) {
  HandlerReady ready;
  for (auto& [method, path] : pairs_of(fields.find("routes", false), "routes", kMostRoutes, fault)) {
    ready.routes.push_back({std::move(method), std::move(path)});
  }
  ready.python = fields.text("python", false);
  return ready;
}

HandlerTensor tensor_from(const json::value& value, std::string& fault) {
  HandlerTensor tensor;
  Fields fields(value, "inputs", fault);
  tensor.name = fields.text("name");
  const auto dtype = dtype_from_oip(fields.text("dtype"));
  if (!dtype) fields.fail("dtype", "is none that is known");
  tensor.dtype = dtype.value_or(Dtype::f32);
  const auto* shape = fields.find("shape");
  if (shape != nullptr) tensor.shape = integers_of(*shape, "shape", fault);
  if (tensor.shape.size() > kMostAxes) fields.fail("shape", "has too many axes");
  for (const std::int64_t size : tensor.shape) {
    if (size < 0) fields.fail("shape", "is negative");
  }
  return tensor;
}

// Gives each tensor its bytes; all of the body has to be some tensor's.
void share_out(std::vector<HandlerTensor>& tensors, std::span<const std::byte> body, std::string& fault) {
  for (HandlerTensor& tensor : tensors) {
    if (!fault.empty()) return;
    const auto bytes = bytes_of(tensor.dtype, tensor.shape);
    if (!bytes || *bytes > body.size()) {
      fault = "the body ends before tensor '" + printable(tensor.name) + "' does";
      return;
    }
    tensor.data = body.first(*bytes);
    body = body.subspan(*bytes);
  }
  if (!body.empty() && fault.empty()) fault = "the body is longer than its tensors";
}

HandlerCall call_from(Fields& fields, std::optional<std::span<const std::byte>> body, std::string& fault) {
  HandlerCall call;
  call.id = natural(fields, "id", fault);
  call.call = natural(fields, "call", fault);
  call.model = fields.text("model", false);
  call.version = fields.text("version", false);
  if (fields.nullable("timeout_ms") != nullptr) {
    const double timeout = fields.number("timeout_ms");
    if (timeout < 0) fields.fail("timeout_ms", "is negative");
    call.timeout_ms = static_cast<std::int64_t>(std::ceil(std::min(timeout, kLongestTimeout)));
  }
  const auto* inputs = fields.find("inputs");
  const auto* list = inputs != nullptr ? inputs->if_array() : nullptr;
  if (list == nullptr || list->size() > kMostTensors) fields.fail("inputs", "is no list, or too long");
  if (list == nullptr || !fault.empty()) return call;
  for (const auto& item : *list) call.inputs.push_back(tensor_from(item, fault));
  if (body) share_out(call.inputs, *body, fault);
  return call;
}

HandlerAnswer answer_from(Fields& fields, std::string& fault) {
  HandlerAnswer answer;
  answer.id = natural(fields, "id", fault);
  const std::int64_t status = fields.integer("status");
  if (status < 200 || status > 599) fields.fail("status", "is none of an answer");
  answer.status = static_cast<unsigned>(status);
  answer.headers = pairs_of(fields.find("headers", false), "headers", kMostLines, fault);
  return answer;
}

FromHandler message_from(std::string_view type, Fields& fields, std::optional<std::span<const std::byte>> body,
                         std::string& fault) {
  if (type == "answer") return answer_from(fields, fault);
  if (type == "call") return call_from(fields, body, fault);
  if (type == "uncall") return HandlerUncall{natural(fields, "id", fault), natural(fields, "call", fault)};
  if (type == "start") return StreamStart{answer_from(fields, fault)};
  if (type == "part") return StreamPart{natural(fields, "id", fault)};
  if (type == "end") return StreamEnd{natural(fields, "id", fault)};
  if (type == "break") return StreamBreak{natural(fields, "id", fault), fields.text("error", false)};
  if (type == "pong") return HandlerPong{natural(fields, "n", fault)};
  if (type == "ready") return ready_from(fields, fault);
  if (type == "failed") return HandlerFailed{fields.text("error"), fields.text("trace", false)};
  if (fault.empty()) fault = "there is no message '" + printable(type) + "'";
  return HandlerPong{};
}

}  // namespace

std::string header_of(const HandlerInit& init) {
  return Header("init")
      .text("name", init.name)
      .text("version", init.version)
      .text("bundle", init.bundle)
      .text("handler", init.handler)
      .text("assets", init.assets)
      .raw("contract", init.contract)
      .raw("properties", "{}")
      .number("concurrency", init.concurrency)
      .number("batch_size", init.batch_size)
      .number("batch_delay_ms", init.batch_delay_ms)
      .done();
}

std::string header_of(const HandlerRequest& request) {
  return Header("request")
      .number("id", request.id)
      .text("method", request.method)
      .text("path", request.path)
      .text("query", request.query)
      .raw("headers", text_of_lines(request.headers))
      .text("client", request.client)
      .text("request_id", request.request_id)
      .text("traceparent", request.traceparent)
      .text("key", request.key)
      .number("deadline_ms", request.deadline_ms)
      .number("depth", static_cast<std::int64_t>(request.depth))
      .done();
}

std::string header_of(const CallResult& result) {
  return Header("result")
      .number("id", result.id)
      .number("call", result.call)
      .raw("status", "200")
      .text("model", result.model)
      .text("model_version", result.version)
      .raw("outputs", text_of_tensors(result.outputs, result.shapes))
      .done();
}

std::string failed_call(std::uint64_t id, std::uint64_t call, unsigned status, std::string_view error) {
  return Header("result")
      .number("id", id)
      .number("call", call)
      .number("status", std::uint64_t{status})
      .text("error", error)
      .done();
}

std::string cancel_header(std::uint64_t id) { return header_with_id("cancel", id); }
std::string more_header(std::uint64_t id) { return header_with_id("more", id); }
std::string ping_header(std::uint64_t number) { return Header("ping").number("n", number).done(); }
std::string drain_header() { return Header("drain").done(); }

Result<FromHandler> parse_from_handler(std::string_view header, std::optional<std::span<const std::byte>> body) {
  json::parse_options options;
  options.max_depth = kMostDepth;
  json::monotonic_resource memory;
  boost::system::error_code error;
  const json::value value = json::parse(header, error, &memory, options);
  if (error) return Error{Code::invalid, "a frame's header is no JSON: " + error.message()};
  std::string fault;
  Fields fields(value, "header", fault);
  const std::string type = fields.text("t");
  FromHandler message = message_from(type, fields, body, fault);
  if (!fault.empty()) return Error{Code::invalid, "a frame is wrong: " + fault};
  return message;
}

}  // namespace mctl
