#include "format/contract.h"

#include <algorithm>
#include <array>
#include <boost/json/serialize.hpp>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>
#include <set>
#include <utility>

namespace mctl {
namespace {

using std::to_string;

struct DtypeInfo {
  std::string_view name, oip;
  std::size_t size;
};

constexpr std::array<DtypeInfo, 13> kDtypes{{{"bool", "BOOL", 1},
                                             {"uint8", "UINT8", 1},
                                             {"uint16", "UINT16", 2},
                                             {"uint32", "UINT32", 4},
                                             {"uint64", "UINT64", 8},
                                             {"int8", "INT8", 1},
                                             {"int16", "INT16", 2},
                                             {"int32", "INT32", 4},
                                             {"int64", "INT64", 8},
                                             {"float16", "FP16", 2},
                                             {"bfloat16", "BF16", 2},
                                             {"float32", "FP32", 4},
                                             {"float64", "FP64", 8}}};

const DtypeInfo& info(Dtype dtype) { return kDtypes[static_cast<std::size_t>(dtype)]; }

std::optional<Dtype> find_dtype(std::string_view DtypeInfo::* field, std::string_view name) {
  for (std::size_t i = 0; i < kDtypes.size(); ++i)
    if (kDtypes[i].*field == name) return static_cast<Dtype>(i);
  return std::nullopt;
}

std::string quoted(std::string_view name) { return '\'' + std::string(name) + '\''; }
std::string input(std::string_view name) { return "input " + quoted(name); }

Error invalid(std::string text) { return {Code::invalid, std::move(text)}; }

std::string allowed(const Dim& dim, std::int64_t most) {
  const std::string range = to_string(dim.min) + ".." + to_string(most);
  return dim.multiple > 1 ? range + " in steps of " + to_string(dim.multiple) : range;
}

// --- check ----------------------------------------------------------------------------------------------------------

Error unknown_input(const Contract& contract, std::string_view name) {
  std::string names;
  for (const Tensor& declared : contract.inputs) names += (names.empty() ? "" : ", ") + declared.name;
  return invalid("unknown input " + quoted(name) + ": the model takes " + names);
}

// order[i] becomes the index in `given` of the contract's input i.
Status bind_names(const Contract& contract, std::span<const Given> given, std::vector<std::size_t>& order) {
  constexpr std::size_t missing = -1;
  order.assign(contract.inputs.size(), missing);
  for (std::size_t g = 0; g < given.size(); ++g) {
    const auto declared = std::find_if(contract.inputs.begin(), contract.inputs.end(),
                                       [&](const Tensor& tensor) { return tensor.name == given[g].name; });
    if (declared == contract.inputs.end()) return unknown_input(contract, given[g].name);
    std::size_t& place = order[static_cast<std::size_t>(declared - contract.inputs.begin())];
    if (place != missing) return invalid(input(given[g].name) + " is there twice");
    place = g;
  }
  for (std::size_t i = 0; i < order.size(); ++i)
    if (order[i] == missing)
      return invalid("missing " + input(contract.inputs[i].name) + ": " + signature(contract.inputs[i]));
  return Done{};
}

std::string axis_text(const Tensor& declared, std::size_t axis, std::int64_t size) {
  return input(declared.name) + ": axis " + to_string(axis) + " is " + to_string(size);
}

// The dim got its size from the first input and axis that have it.
Error disagreement(const Contract& contract, std::size_t dim, std::string here, std::int64_t bound) {
  for (const Tensor& declared : contract.inputs)
    for (std::size_t axis = 0; axis < declared.shape.size(); ++axis)
      if (declared.shape[axis].dim() == dim)
        return invalid(std::move(here) + ", but " + contract.dims[dim].name + " is " + to_string(bound) + " (" +
                       input(declared.name) + ", axis " + to_string(axis) + ")");
  return {Code::internal, "no input has the dim " + quoted(contract.dims[dim].name)};
}

Status check_kind(const Tensor& declared, const Given& given) {
  if (given.dtype != declared.dtype)
    return invalid(input(declared.name) + ": dtype is " + std::string(name_of(given.dtype)) + ", allowed " +
                   std::string(name_of(declared.dtype)));
  if (given.shape.size() != declared.shape.size())
    return invalid(input(declared.name) + ": rank is " + to_string(given.shape.size()) + ", allowed " +
                   to_string(declared.shape.size()) + " (" + signature(declared) + ")");
  return Done{};
}

// Sizes that are not bound yet are -1 in `bound`.
Status check_axis(const Contract& contract, const Tensor& declared, std::size_t axis, std::int64_t size,
                  std::optional<std::int64_t> max_rows, DimSizes& bound) {
  const auto index = declared.shape[axis].dim();
  if (!index) {
    const std::int64_t wanted = declared.shape[axis].constant().value_or(-1);
    if (size != wanted) return invalid(axis_text(declared, axis, size) + ", allowed " + to_string(wanted));
    return Done{};
  }
  const Dim& dim = contract.dims[*index];
  const std::int64_t most = max_rows && index == contract.batch_dim ? *max_rows : dim.max;
  if (size < dim.min || size > most || size % dim.multiple != 0)
    return invalid(axis_text(declared, axis, size) + ", allowed " + allowed(dim, most) + " (" + dim.name + ")");
  if (bound[*index] < 0) bound[*index] = size;
  if (bound[*index] != size) return disagreement(contract, *index, axis_text(declared, axis, size), bound[*index]);
  return Done{};
}

template <class T>
std::pair<T, T> extremes(std::span<const std::byte> data) {
  T low = std::numeric_limits<T>::max(), high = std::numeric_limits<T>::min();
  for (std::size_t at = 0; at + sizeof(T) <= data.size(); at += sizeof(T)) {
    T value;
    std::memcpy(&value, data.data() + at, sizeof value);
    low = std::min(low, value);
    high = std::max(high, value);
  }
  return {low, high};
}

bool is_over_dims(const ValueRange& range) { return range.low.uses_dims() || range.high.uses_dims(); }

Result<std::int64_t> value_of(const Expression& expression, std::span<const std::int64_t> dims) {
  const auto value = expression.evaluate(dims);
  return value ? *value : Result<std::int64_t>(invalid(expression.fault(dims)));
}

template <class T>
Status check_range(const Tensor& declared, std::span<const std::byte> data, std::span<const std::int64_t> dims) {
  const auto least = value_of(declared.range->low, dims), most = value_of(declared.range->high, dims);
  if (!least) return least.error();
  if (!most) return most.error();
  if (data.size() < sizeof(T)) return Done{};
  const auto [low, high] = extremes<T>(data);
  for (const T value : {low, high})
    if (std::cmp_less(value, *least) || std::cmp_greater(value, *most)) {
      const std::string ends = to_string(*least) + ".." + to_string(*most), declared_as = declared.range->text();
      return invalid(input(declared.name) + ": value " + to_string(value) + ", allowed " + ends +
                     (declared_as == ends ? "" : " (" + declared_as + ")"));
    }
  return Done{};
}

Status check_values(const Tensor& declared, std::span<const std::byte> data, std::span<const std::int64_t> dims) {
  switch (declared.dtype) {
    case Dtype::u8:
      return check_range<std::uint8_t>(declared, data, dims);
    case Dtype::u16:
      return check_range<std::uint16_t>(declared, data, dims);
    case Dtype::u32:
      return check_range<std::uint32_t>(declared, data, dims);
    case Dtype::u64:
      return check_range<std::uint64_t>(declared, data, dims);
    case Dtype::i8:
      return check_range<std::int8_t>(declared, data, dims);
    case Dtype::i16:
      return check_range<std::int16_t>(declared, data, dims);
    case Dtype::i32:
      return check_range<std::int32_t>(declared, data, dims);
    case Dtype::i64:
      return check_range<std::int64_t>(declared, data, dims);
    default:
      return Done{};
  }
}

// --- validate -------------------------------------------------------------------------------------------------------

constexpr std::int64_t kMaxSize = std::int64_t{1} << 40;  // of an axis
constexpr double kMaxPad = 9007199254740992;              // 2**53: integers up to here are exact
constexpr std::size_t kMaxDeclared = 4096, kMaxRank = 16;

bool is_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; }

bool is_identifier(std::string_view name) {
  return !name.empty() && !('0' <= name[0] && name[0] <= '9') && std::all_of(name.begin(), name.end(), is_word);
}

Error unsound(std::string text) { return {Code::damaged, std::move(text)}; }

Status check_names(const std::string& what, const std::vector<std::string_view>& names, std::size_t limit) {
  if (names.size() > limit)
    return unsound("a contract has " + to_string(names.size()) + " of the kind " + quoted(what) + ", allowed " +
                   to_string(limit));
  std::set<std::string_view> seen;
  for (const std::string_view name : names) {
    if (!is_name(name))
      return unsound(what + " name " + quoted(name.substr(0, 64)) +
                     " is not allowed: letters, digits, `_`, `.` and `-`");
    if (!seen.insert(name).second) return unsound(what + ' ' + quoted(name) + " is declared twice");
  }
  return Done{};
}

Status check_dim(const Dim& dim) {
  if (!is_identifier(dim.name)) return unsound("dim " + quoted(dim.name) + " is no identifier");
  const bool fits = 1 <= dim.min && dim.min < dim.max && dim.max <= kMaxSize && dim.multiple >= 1;
  if (!fits || dim.min % dim.multiple != 0 || dim.max % dim.multiple != 0)
    return unsound("dim " + quoted(dim.name) + " has no sound range: " + allowed(dim, dim.max));
  return Done{};
}

// The smallest and largest value of an integer dtype, within int64.
std::optional<std::pair<std::int64_t, std::int64_t>> limits_of(Dtype dtype) {
  if (!is_integer(dtype)) return std::nullopt;
  const int bits = static_cast<int>(8 * item_size(dtype));
  if (dtype >= Dtype::i8) return std::pair(INT64_MIN >> (64 - bits), INT64_MAX >> (64 - bits));
  return std::pair(std::int64_t{0}, bits == 64 ? INT64_MAX : (std::int64_t{1} << bits) - 1);
}

Status check_size(const std::string& where, std::optional<std::int64_t> size, const std::string& text) {
  if (size && 0 <= *size && *size <= kMaxSize) return Done{};
  return unsound(where + " has an axis of " + text + ", allowed 0.." + to_string(kMaxSize));
}

Status check_rank(const std::string& where, std::size_t rank) {
  if (rank <= kMaxRank) return Done{};
  return unsound(where + " has " + to_string(rank) + " axes, allowed " + to_string(kMaxRank));
}

// An axis without dims is a size that has to be sound; the others' depend on a request.
Status check_shape(const std::string& where, std::span<const Expression> shape) {
  if (auto rank = check_rank(where, shape.size()); !rank) return rank;
  for (const Expression& axis : shape)
    if (!axis.uses_dims())
      if (auto size = check_size(where, axis.constant(), axis.text()); !size) return size;
  return Done{};
}

Status check_state(const State& state) {
  const std::string where = "state " + quoted(state.name);
  if (auto rank = check_rank(where, state.shape.size()); !rank) return rank;
  for (const std::int64_t axis : state.shape)
    if (auto size = check_size(where, axis, to_string(axis)); !size) return size;
  return Done{};
}

bool can_hold(Dtype dtype, double value) {
  if (const auto limits = limits_of(dtype))
    return value == std::trunc(value) && std::abs(value) <= kMaxPad && value >= static_cast<double>(limits->first) &&
           value <= static_cast<double>(limits->second);
  return dtype == Dtype::boolean ? value == 0 || value == 1 : std::abs(value) <= 1e308;
}

// Of integers, within their dtype where it is fixed, and not empty where all dims are smallest or all largest.
bool is_sound(const ValueRange& range, Dtype dtype, std::span<const Dim> dims) {
  const auto limits = limits_of(dtype);
  if (!limits) return false;
  for (const Expression* end : {&range.low, &range.high})
    if (!end->uses_dims())
      if (const auto fixed = end->constant(); !fixed || *fixed < limits->first || *fixed > limits->second) return false;
  DimSizes smallest, largest;
  for (const Dim& dim : dims) {
    smallest.push_back(dim.min);
    largest.push_back(dim.max);
  }
  for (const DimSizes& sizes : {smallest, largest}) {
    const auto low = range.low.evaluate(sizes), high = range.high.evaluate(sizes);
    if (!low || !high || *low > *high) return false;
  }
  return true;
}

Status check_input(const Tensor& declared, std::span<const Dim> dims) {
  if (auto shape = check_shape(input(declared.name), declared.shape); !shape) return shape;
  if (declared.range && !is_sound(*declared.range, declared.dtype, dims))
    return unsound(input(declared.name) + " has no sound value range: " + declared.range->text());
  if (declared.pad && !can_hold(declared.dtype, *declared.pad))
    return unsound(input(declared.name) + " has a pad value that " + std::string(name_of(declared.dtype)) +
                   " cannot hold");
  return Done{};
}

Status check_tensors(const Contract& contract) {
  for (const Tensor& declared : contract.inputs)
    if (auto sound = check_input(declared, contract.dims); !sound) return sound;
  for (const Tensor& output : contract.outputs)
    if (auto sound = check_shape("output " + quoted(output.name), output.shape); !sound) return sound;
  for (const State& state : contract.state)
    if (auto sound = check_state(state); !sound) return sound;
  return Done{};
}

// Requests can be joined along the dim: inputs have it as axis 0 or not at all, outputs as axis 0, times a number.
std::string batch_fault(const Contract& contract, std::size_t batch) {
  const auto beyond_first = [batch](const Tensor& tensor) {
    return std::any_of(tensor.shape.begin() + !tensor.shape.empty(), tensor.shape.end(),
                       [batch](const Expression& axis) { return axis.uses(batch); });
  };
  if (contract.dims[batch].multiple != 1) return "it has a multiple";
  for (const Tensor& declared : contract.inputs) {
    if (beyond_first(declared)) return input(declared.name) + " has it on an axis other than 0";
    if (declared.range && (declared.range->low.uses(batch) || declared.range->high.uses(batch)))
      return input(declared.name) + " has it in the range of its values";
  }
  for (const Tensor& output : contract.outputs) {
    if (!rows_per_item(output, batch)) return "output " + quoted(output.name) + " does not have it as axis 0";
    if (beyond_first(output)) return "output " + quoted(output.name) + " has it on an axis other than 0";
  }
  return {};
}

bool is_bound(const Contract& contract, std::size_t dim) {
  return std::any_of(contract.inputs.begin(), contract.inputs.end(), [dim](const Tensor& declared) {
    return std::any_of(declared.shape.begin(), declared.shape.end(),
                       [dim](const Expression& axis) { return axis.uses(dim); });
  });
}

template <class Items>
std::vector<std::string_view> names_of(const Items& items) {
  std::vector<std::string_view> names;
  for (const auto& item : items) names.push_back(item.name);
  return names;
}

Status check_all_names(const Contract& contract) {
  auto inputs = names_of(contract.inputs);
  for (const auto& constant : contract.constants) inputs.push_back(constant.name);
  if (auto names = check_names("dim", names_of(contract.dims), kMaxDims); !names) return names;
  if (auto names = check_names("input", inputs, kMaxDeclared); !names) return names;
  if (auto names = check_names("output", names_of(contract.outputs), kMaxDeclared); !names) return names;
  return check_names("state", names_of(contract.state), kMaxDeclared);
}

// --- JSON of a scalar, as Python's side prints it -------------------------------------------------------------------

// The shortest digits that read back as the same number; plain from 1e-5 to 1e16.
std::string json_of(double value) {
  if (!std::isfinite(value)) return "null";
  const double size = std::abs(value);
  const bool plain = value == 0 || (1e-5 <= size && size < 1e16);
  char text[64];
  const auto format = plain ? std::chars_format::fixed : std::chars_format::scientific;
  std::string number(text, std::to_chars(text, text + sizeof text, value, format).ptr);
  if (plain) return number.find('.') == std::string::npos ? number + ".0" : number;
  const std::size_t exponent = number.find('e') + 1;  // "e+22", "e-07"
  const std::size_t digits = number.find_first_not_of("+-0", exponent);
  return number.substr(0, exponent) + (number[exponent] == '-' ? "-" : "") + number.substr(digits);
}

struct JsonOf {
  std::string operator()(std::monostate) const { return "null"; }
  std::string operator()(bool value) const { return value ? "true" : "false"; }
  std::string operator()(std::int64_t value) const { return to_string(value); }
  std::string operator()(double value) const { return json_of(value); }
  std::string operator()(const std::string& value) const { return boost::json::serialize(value); }
};

}  // namespace

bool is_name(std::string_view name) {
  return !name.empty() && name.size() <= 256 && is_word(name[0]) &&
         std::all_of(name.begin(), name.end(), [](char c) { return is_word(c) || c == '.' || c == '-'; });
}

std::size_t item_size(Dtype dtype) { return info(dtype).size; }
bool is_integer(Dtype dtype) { return Dtype::u8 <= dtype && dtype <= Dtype::i64; }
std::string_view name_of(Dtype dtype) { return info(dtype).name; }
std::string_view oip_name_of(Dtype dtype) { return info(dtype).oip; }
std::optional<Dtype> dtype_from_name(std::string_view name) { return find_dtype(&DtypeInfo::name, name); }
std::optional<Dtype> dtype_from_oip(std::string_view name) { return find_dtype(&DtypeInfo::oip, name); }

Result<DimSizes> check(const Contract& contract, std::span<const Given> given, std::vector<std::size_t>& order,
                       std::optional<std::int64_t> max_rows) {
  if (auto named = bind_names(contract, given, order); !named) return named.error();
  DimSizes bound(contract.dims.size(), -1);
  for (std::size_t i = 0; i < order.size(); ++i) {
    const Tensor& declared = contract.inputs[i];
    const Given& tensor = given[order[i]];
    if (auto kind = check_kind(declared, tensor); !kind) return kind.error();
    for (std::size_t axis = 0; axis < tensor.shape.size(); ++axis)
      if (auto fits = check_axis(contract, declared, axis, tensor.shape[axis], max_rows, bound); !fits)
        return fits.error();
    if (declared.range && !is_over_dims(*declared.range))
      if (auto values = check_values(declared, tensor.data, {}); !values) return values.error();
  }
  for (std::size_t i = 0; i < order.size(); ++i) {
    const Tensor& declared = contract.inputs[i];  // its range may be over dims of inputs that come later
    if (declared.range && is_over_dims(*declared.range))
      if (auto values = check_values(declared, given[order[i]].data, bound); !values) return values.error();
  }
  return bound;
}

Status check_constant(const Contract& contract, std::string_view name, const Scalar& value) {
  for (const Constant& constant : contract.constants) {
    if (constant.name != name) continue;
    if (value == constant.value) return Done{};
    return invalid("constant " + quoted(name) + ": is " + std::visit(JsonOf{}, value) + ", compiled in as " +
                   std::visit(JsonOf{}, constant.value));
  }
  return invalid("unknown constant " + quoted(name));
}

Result<std::vector<std::int64_t>> shape_of(const Tensor& tensor, std::span<const std::int64_t> dims) {
  std::vector<std::int64_t> shape;
  shape.reserve(tensor.shape.size());
  for (std::size_t axis = 0; axis < tensor.shape.size(); ++axis) {
    const auto size = tensor.shape[axis].evaluate(dims);
    if (!size) return invalid(tensor.shape[axis].fault(dims));
    if (*size < 0)
      return invalid(quoted(tensor.name) + ": axis " + to_string(axis) + " is " + to_string(*size) + " (" +
                     tensor.shape[axis].text() + ")");
    shape.push_back(*size);
  }
  return shape;
}

Result<std::size_t> bytes_of(Dtype dtype, std::span<const std::int64_t> shape) {
  std::int64_t bytes = static_cast<std::int64_t>(item_size(dtype));
  bool empty = false, overflow = false;
  for (const std::int64_t size : shape) {
    if (size < 0) return invalid("a size is negative");
    empty |= size == 0;
    overflow |= __builtin_mul_overflow(bytes, size == 0 ? 1 : size, &bytes);
  }
  if (empty) return std::size_t{0};
  if (overflow) return invalid("a tensor has more bytes than 64 bits can count");
  return static_cast<std::size_t>(bytes);
}

Result<std::size_t> bytes_of(const Tensor& tensor, std::span<const std::int64_t> dims) {
  const auto shape = shape_of(tensor, dims);
  return shape ? bytes_of(tensor.dtype, *shape) : Result<std::size_t>(shape.error());
}

Limits limits_of(const Tensor& tensor, std::span<const std::int64_t> dims) {
  if (!tensor.range) return {0, 0};
  const auto low = tensor.range->low.evaluate(dims), high = tensor.range->high.evaluate(dims);
  return low && high && *low <= *high ? Limits(*low, *high) : Limits(0, 0);
}

std::string signature(const Tensor& tensor) {
  std::string axes;
  for (const Expression& axis : tensor.shape) axes += (axes.empty() ? "" : ",") + axis.text();
  return std::string(name_of(tensor.dtype)) + '[' + axes + ']';
}

Result<std::size_t> capacity_of(const Tensor& tensor, std::span<const Dim> dims) {
  std::vector<std::int64_t> most;
  for (const Expression& axis : tensor.shape) {
    const auto bounds = axis.bounds(dims);
    if (!bounds) return invalid(quoted(tensor.name) + ": axis `" + axis.text() + "` has no upper bound");
    most.push_back(std::max<std::int64_t>(bounds->high, 0));
  }
  return bytes_of(tensor.dtype, most);
}

std::optional<std::int64_t> rows_per_item(const Tensor& output, std::size_t batch_dim) {
  return output.shape.empty() ? std::nullopt : output.shape[0].times(batch_dim);
}

Status validate(const Contract& contract) {
  if (auto names = check_all_names(contract); !names) return names;
  if (contract.inputs.empty() || contract.outputs.empty())
    return unsound("a contract has at least one input and one output");
  for (const Dim& dim : contract.dims)
    if (auto sound = check_dim(dim); !sound) return sound;
  if (auto tensors = check_tensors(contract); !tensors) return tensors;
  for (std::size_t dim = 0; dim < contract.dims.size(); ++dim)
    if (!is_bound(contract, dim)) return unsound("no input has the dim " + quoted(contract.dims[dim].name));
  if (!contract.batch_dim) return Done{};
  const std::string fault = batch_fault(contract, *contract.batch_dim);
  if (fault.empty()) return Done{};
  return unsound("batch dim " + quoted(contract.dims[*contract.batch_dim].name) + ": " + fault);
}

}  // namespace mctl
