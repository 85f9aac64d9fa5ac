// An inference request of the Open Inference Protocol: JSON, or JSON with Triton's binary tensors behind it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "format/contract.h"
#include "format/result.h"

namespace mctl {

struct InferRequest {
  struct Input {
    std::string name;  // the contract's, if it has such an input
    Dtype dtype = Dtype::f32;
    std::vector<std::int64_t> shape;
    std::span<const std::byte> data;  // in the body, or in `parsed`
    std::vector<std::byte> parsed;
  };
  struct Output {
    std::size_t index = 0;  // in the contract
    std::string name;       // as the client calls it
    bool binary = false;
  };
  std::optional<std::string> id;
  std::vector<Input> inputs;
  std::vector<Output> outputs;                             // those asked for; all, if none is
  std::vector<std::pair<std::string, Scalar>> parameters;  // that have the name of one of the contract's constants
  std::optional<std::int64_t> timeout_us;
};

// Reads a body; sizes are checked against shapes, shapes not yet against the contract. `json_length` is the JSON's
// share of the body where binary tensors follow; 0: the body is the one input. `max_rows` bounds what JSON may hold.
Result<InferRequest> parse_infer(const Contract& contract, std::span<const std::byte> body,
                                 std::optional<std::uint64_t> json_length, std::int64_t max_rows);

// The position of a name among tensors, Triton's aliases (`INPUT__0`) included.
std::optional<std::size_t> position(std::span<const Tensor> tensors, std::string_view alias, std::string_view name);

}  // namespace mctl
