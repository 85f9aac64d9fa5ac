// A client's bytes: the same request in however many pieces they come, and bodies that are read and written alike.
#include "doors/http.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "check.h"
#include "doors/inflate.h"
#include "doors/oip_answer.h"
#include "doors/oip_request.h"
#include "doors/reader.h"
#include "format/contract_json.h"
#include "format/elements.h"
#include "format/json.h"
#include "format/text.h"

namespace mctl {
namespace {

constexpr std::size_t kMaxBody = 64 << 10, kMaxHeader = 4 << 10;

Contract contract_of(std::string_view text) {
  std::string fault;
  Contract contract = contract_from_json(boost::json::parse(text), fault);
  require(fault.empty() && validate(contract), "the target's own contract is sound");
  return contract;
}

const Contract kModels[] = {
    contract_of(
        R"({"dims": [{"name": "batch", "min": 1, "max": 8}, {"name": "seq", "min": 2, "max": 16, "multiple": 2}],
      "inputs": [{"name": "ids", "dtype": "int64", "shape": ["batch", "seq"], "range": [0, 99]},
                 {"name": "x", "dtype": "float32", "shape": ["batch", 2]},
                 {"name": "mask", "dtype": "bool", "shape": ["batch"]}],
      "outputs": [{"name": "y", "dtype": "float32", "shape": ["batch", 2]}],
      "constants": [{"name": "k", "value": 2}], "batch_dim": "batch"})"),
    contract_of(R"({"dims": [{"name": "batch", "min": 1, "max": 8}],
      "inputs": [{"name": "x", "dtype": "float16", "shape": ["batch", 2]}],
      "outputs": [{"name": "y", "dtype": "float16", "shape": ["batch", 2]}], "batch_dim": "batch"})"),
};

// --- the request, however it comes
// ------------------------------------------------------------------------------------

struct Seen {
  std::string error;
  bool head_done = false, done = false;
  std::size_t used = 0;
  Head head;
  std::string body;
};

// As connection.cc reads: `text` comes in pieces that end at `cuts`.
Seen read(std::string_view text, std::span<const std::size_t> cuts) {
  RequestReader reader(kMaxBody, kMaxHeader);
  Seen seen;
  std::size_t given = 0;
  for (const std::size_t cut : cuts) {
    while (given < cut && !seen.done) {
      if (reader.space().empty()) require(reader.make_room(reader.wanted()), "there is memory");
      const auto space = reader.space();
      require(!space.empty(), "there is room for more");
      const std::size_t count = std::min(space.size(), cut - given);
      std::memcpy(space.data(), text.data() + given, count);
      reader.came(count);
      given += count;
      auto step = reader.parse();
      while (step && *step == RequestReader::Step::head) step = reader.parse();
      if (!step) {
        seen.error = step.error().text;
        require(status_of(step.error().code) >= 400, "a refusal is a client's fault");
        return seen;
      }
      seen.done = *step == RequestReader::Step::whole;
      const std::size_t body = reader.head_done() ? reader.body().size() : 0;
      require(reader.capacity() <= 4 * (kMaxHeader + RequestReader::kFirst + std::min(body, given)),
              "memory grows with what came");
    }
  }
  seen.head_done = reader.head_done();
  if (seen.head_done) seen.head = reader.head();
  if (!seen.done) return seen;
  seen.used = given - reader.ahead();
  const auto body = std::as_bytes(reader.body());
  seen.body.assign(reinterpret_cast<const char*>(body.data()), body.size());
  require(!seen.head.content_length || *seen.head.content_length == body.size(), "the body ends where its length says");
  return seen;
}

// A refusal ends the connection: which fault it names may depend on what had come.
bool same(const Seen& a, const Seen& b) {
  const auto fields = [](const Head& head) {
    return std::tie(head.verb, head.target, head.host, head.origin, head.content_type, head.content_encoding,
                    head.accept, head.request_id, head.content_length, head.json_length, head.timeout_ms,
                    head.expects_continue, head.keep_alive, head.http_1_0);
  };
  return a.error.empty() == b.error.empty() && a.done == b.done &&
         (!a.done || (a.used == b.used && a.body == b.body && fields(a.head) == fields(b.head)));
}

// A place that the bytes themselves choose, so that the same input is the same test.
std::size_t cut_of(std::string_view text) {
  return text.empty() ? 0 : std::hash<std::string_view>{}(text) % text.size();
}

// --- what stands in it
// ------------------------------------------------------------------------------------------------

// Elements written as JSON are read as the same elements.
void check_elements(const Contract& contract, const InferRequest::Input& input) {
  std::string text = "{\"inputs\":[{\"name\":";
  append_json_string(text, input.name);
  text += ",\"shape\":[" + std::to_string(input.data.size() / item_size(input.dtype)) + "],\"datatype\":\"";
  (text += oip_name_of(input.dtype)) += "\",\"data\":[";
  if (append_elements(text, input.dtype, input.data)) return;  // NaN or Infinity
  text += "]}]}";
  const auto again = parse_infer(contract, std::as_bytes(std::span(text)), std::nullopt, 1 << 20);
  require(again && std::ranges::equal(again->inputs.at(0).data, input.data), "elements survive JSON");
}

void check_answer(const Contract& contract, const InferRequest& request, const DimSizes& dims) {
  std::vector<OutputView> outputs;
  std::vector<std::vector<std::byte>> zeros;
  for (const Tensor& output : contract.outputs) zeros.emplace_back(*bytes_of(output, dims));
  for (std::size_t i = 0; i < zeros.size(); ++i) outputs.push_back({*shape_of(contract.outputs[i], dims), zeros[i]});
  const auto answer = answer_infer("m", "1", contract, request, outputs);
  require(static_cast<bool>(answer), "zeros can be answered");
  if (answer->type == "application/json") {
    const auto json = parse_json(answer->body);
    require(json && (!request.id || json->at("id").is_string()), "a JSON answer is JSON, with the client's id");
  }
}

void infer(const Contract& contract, const Head& head, std::span<const std::byte> body) {
  const auto request = parse_infer(contract, body, head.json_length, 64);
  if (!request) return require(status_of(request.error().code) != 500, "a bad request is no fault of the server");
  std::vector<Given> given;
  for (const auto& input : request->inputs) {
    given.push_back({input.name, input.dtype, input.shape, input.data});
    check_elements(contract, input);
  }
  std::vector<std::size_t> order;
  const auto dims = check(contract, given, order, 64);
  if (!dims) return require(status_of(dims.error().code) == 400, "what breaks the contract is a client's fault");
  for (std::size_t i = 0; i < order.size(); ++i)
    require(request->inputs[order[i]].data.size() == *bytes_of(contract.inputs[i], *dims), "inputs have their size");
  check_answer(contract, *request, *dims);
}

void serve(const Seen& seen) {
  std::string inflated, body = seen.body;
  if (!seen.head.content_encoding.empty()) {
    auto plain = inflate(seen.head.content_encoding, std::as_bytes(std::span(body)), kMaxBody);
    if (!plain) return require(status_of(plain.error().code) != 500, "a bad body is no fault of the server");
    require(plain->size() <= kMaxBody, "an inflated body is bounded");
    body = plain->text();
  }
  for (const Contract& contract : kModels) infer(contract, seen.head, std::as_bytes(std::span(body)));
}

// After its first piece a head is read on when its end is there: a fault in it may wait for that.
void check_pieces(std::string_view text, const Seen& whole, std::span<const std::size_t> cuts) {
  const Seen pieces = read(text, cuts);
  const bool waits = !whole.error.empty() && pieces.error.empty() && !pieces.head_done;
  require(waits || same(whole, pieces), "the same bytes are the same request in any pieces");
}

void run(std::string_view text) {
  const Seen whole = read(text, std::array{text.size()});
  check_pieces(text, whole, std::array{cut_of(text), text.size()});
  std::vector<std::size_t> every(std::min<std::size_t>(text.size(), 512));
  std::iota(every.begin(), every.end(), 1);
  if (!every.empty()) every.back() = text.size();
  check_pieces(text, whole, every);
  if (whole.done) serve(whole);
}

}  // namespace
}  // namespace mctl

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  mctl::run({reinterpret_cast<const char*>(data), size});
  return 0;
}
