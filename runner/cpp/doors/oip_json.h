// The JSON part of an inference request, read in one pass straight into tensors.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "doors/oip_request.h"
#include "format/contract.h"
#include "format/elements.h"
#include "format/result.h"

namespace mctl {

struct JsonInput {
  std::optional<std::string> name;
  std::optional<Dtype> dtype;
  std::optional<std::vector<std::int64_t>> shape;
  std::optional<std::uint64_t> binary_size;
  bool has_data = false;
  std::vector<std::byte> data;        // of `count` elements or fewer: what is over the limit is not kept
  std::vector<std::int64_t> lengths;  // of the nested lists of `data`, the outermost first
  std::size_t count = 0;              // elements of `data`
};

struct JsonOutput {
  std::optional<std::string> name;
  std::optional<bool> binary;
};

struct InferJson {
  std::optional<std::string> id;
  std::vector<JsonInput> inputs;
  std::vector<JsonOutput> outputs;
  std::vector<std::pair<std::string, Scalar>> parameters;  // the request's own, other than those below
  std::optional<std::int64_t> timeout_us;
  bool binary_output = false;
};

// Code::invalid for what is malformed; Code::unimplemented for extensions that are not there. `limit` is the most
// elements of one tensor that are kept.
Result<InferJson> parse_infer_json(std::string_view text, std::size_t limit);

}  // namespace mctl
