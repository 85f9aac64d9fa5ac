// What a model takes and gives, and the check made before every call. Mirrors bundle_format/contract.py: same rules,
// same messages; tests/vectors/contract/*.json runs both.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "format/expression.h"
#include "format/result.h"

namespace mctl {

constexpr std::size_t kMaxDims = 64;

enum class Dtype : std::uint8_t { boolean, u8, u16, u32, u64, i8, i16, i32, i64, f16, bf16, f32, f64 };

std::size_t item_size(Dtype dtype);
bool is_integer(Dtype dtype);
std::string_view name_of(Dtype dtype);      // "float32"
std::string_view oip_name_of(Dtype dtype);  // "FP32"
std::optional<Dtype> dtype_from_name(std::string_view name);
std::optional<Dtype> dtype_from_oip(std::string_view name);

struct ValueRange {  // smallest and largest value that is allowed
  Expression low, high;
  std::string text() const { return low.text() + ".." + high.text(); }
};

using Limits = std::pair<std::int64_t, std::int64_t>;

struct Tensor {  // a declared input or output
  std::string name;
  Dtype dtype = Dtype::f32;
  std::vector<Expression> shape;
  std::optional<ValueRange> range;  // inputs: allowed values, integer dtypes
  std::optional<double> pad;        // inputs: pads non-batch dims
};

using Scalar = std::variant<std::monostate, bool, std::int64_t, double, std::string>;
struct Constant {
  std::string name;
  Scalar value;
};

struct State {  // a buffer that the model changes
  std::string name;
  Dtype dtype = Dtype::f32;
  std::vector<std::int64_t> shape;
};

struct Contract {
  std::vector<Dim> dims;
  std::vector<Tensor> inputs, outputs;
  std::vector<Constant> constants;
  std::vector<State> state;
  std::optional<std::size_t> batch_dim;  // index in dims
  bool random = false;
};

// What came for one input. `data` is used for the value range only; empty: not checked.
struct Given {
  std::string_view name;
  Dtype dtype;
  std::span<const std::int64_t> shape;
  std::span<const std::byte> data;
};

// Binds the dims, or says what does not fit (Code::invalid). `max_rows` replaces the batch dim's maximum.
// Given tensors may come in any order; order[i] receives the index in `given` of the contract's input i.
Result<DimSizes> check(const Contract& contract, std::span<const Given> given, std::vector<std::size_t>& order,
                       std::optional<std::int64_t> max_rows = std::nullopt);
Status check_constant(const Contract& contract, std::string_view name, const Scalar& value);

Result<std::vector<std::int64_t>> shape_of(const Tensor& tensor, std::span<const std::int64_t> dims);
Result<std::size_t> bytes_of(const Tensor& tensor, std::span<const std::int64_t> dims);  // overflow is an error
Result<std::size_t> bytes_of(Dtype dtype, std::span<const std::int64_t> shape);
// The ends of the range at these sizes; of a tensor without a range, or where an end has no value, zeros.
Limits limits_of(const Tensor& tensor, std::span<const std::int64_t> dims);
std::string signature(const Tensor& tensor);  // float32[batch,128]

// The most bytes that the tensor has for any sizes of these dims.
Result<std::size_t> capacity_of(const Tensor& tensor, std::span<const Dim> dims);

// May inputs, outputs, models and versions have this name? `[A-Za-z0-9_][A-Za-z0-9_.-]*`, at most 256.
bool is_name(std::string_view name);

// Is the contract itself sound? Code::damaged says why not.
Status validate(const Contract& contract);

// k where axis 0 of an output is k*batch; nullopt for anything else.
std::optional<std::int64_t> rows_per_item(const Tensor& output, std::size_t batch_dim);

}  // namespace mctl
