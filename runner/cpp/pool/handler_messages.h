// What front and handler processes tell each other, as headers of frames. ARCHITECTURE.md has them in one table.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "format/contract.h"
#include "format/result.h"

namespace mctl {

using HeaderLines = std::vector<std::pair<std::string, std::string>>;  // of HTTP

// --- from the front: each makes a header

struct HandlerInit {
  std::string_view name, version;  // of the model
  std::string_view bundle;         // its path
  std::string_view handler;        // path of a file, "stock:NAME", or "bundle": its own
  std::string_view assets;         // a folder; empty: what belongs to the handler
  std::string_view contract;       // JSON
  std::int64_t concurrency = 1, batch_size = 1, batch_delay_ms = 0;
};
std::string header_of(const HandlerInit& init);

struct HandlerRequest {
  std::uint64_t id = 0;
  std::string_view method, path, query;
  std::span<const std::pair<std::string, std::string>> headers;
  std::string_view client, request_id, traceparent, key;
  std::int64_t deadline_ms = 0;  // what is left
  int depth = 0;
};
std::string header_of(const HandlerRequest& request);

// The outputs of a call; the bytes of each follow, in this order.
struct CallResult {
  std::uint64_t id = 0, call = 0;
  std::string_view model, version;
  std::span<const Tensor> outputs;
  std::span<const std::vector<std::int64_t>> shapes;
};
std::string header_of(const CallResult& result);
std::string failed_call(std::uint64_t id, std::uint64_t call, unsigned status, std::string_view error);

std::string cancel_header(std::uint64_t id);
std::string more_header(std::uint64_t id);  // the client has taken the oldest part that was not acknowledged
std::string ping_header(std::uint64_t number);
std::string drain_header();

// --- from the handler

struct HandlerRoute {
  std::string method, path;
  bool operator==(const HandlerRoute&) const = default;
};

struct HandlerReady {
  std::vector<HandlerRoute> routes;
  std::string python;
};
struct HandlerFailed {
  std::string error, trace;
};
struct HandlerTensor {
  std::string name;
  Dtype dtype = Dtype::f32;
  std::vector<std::int64_t> shape;
  std::span<const std::byte> data;  // in the frame
};
struct HandlerCall {
  std::uint64_t id = 0, call = 0;
  std::string model, version;  // empty: its own; any
  std::vector<HandlerTensor> inputs;
  std::optional<std::int64_t> timeout_ms;
};
struct HandlerUncall {
  std::uint64_t id = 0, call = 0;
};
struct HandlerAnswer {  // with its body
  std::uint64_t id = 0;
  unsigned status = 200;
  HeaderLines headers;
};
struct StreamStart : HandlerAnswer {};  // its parts follow
struct StreamPart {
  std::uint64_t id = 0;
};
struct StreamEnd {
  std::uint64_t id = 0;
};
struct StreamBreak {
  std::uint64_t id = 0;
  std::string error;
};
struct HandlerPong {
  std::uint64_t number = 0;
};

using FromHandler = std::variant<HandlerReady, HandlerFailed, HandlerCall, HandlerUncall, HandlerAnswer, StreamStart,
                                 StreamPart, StreamEnd, StreamBreak, HandlerPong>;

// Code::invalid says what is wrong with the header. `body`: nullopt, if it was too large to be kept; the tensors of a
// call are then without bytes.
Result<FromHandler> parse_from_handler(std::string_view header, std::optional<std::span<const std::byte>> body);

}  // namespace mctl
