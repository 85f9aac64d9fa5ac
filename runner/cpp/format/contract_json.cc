#include "format/contract_json.h"

#include "format/json.h"

namespace mctl {
namespace {

namespace json = boost::json;

Dtype read_dtype(Fields& fields) {
  const std::string name = fields.text("dtype");
  const auto dtype = dtype_from_name(name);
  if (!dtype) fields.fail("dtype", "is no dtype that is known");
  return dtype.value_or(Dtype::f32);
}

Dim read_dim(const json::value& value, const std::string& where, std::string& fault) {
  Fields fields(value, where, fault);
  Dim dim{fields.text("name"), fields.integer("min"), fields.integer("max"), fields.integer("multiple", 1)};
  fields.finish();
  return dim;
}

// An axis of an input is a size or a dim; of an output also an expression.
Expression read_axis(const json::value& value, const std::string& where, std::span<const Dim> dims, bool expressions,
                     std::string& fault) {
  if (!value.is_string()) return Expression::fixed(integer_of(value, where, fault));
  const std::string text(value.get_string());
  const auto axis = Expression::parse(text, dims);
  const bool allowed = axis && (expressions || (axis->dim() && dims[*axis->dim()].name == text));
  if (!allowed && fault.empty()) fault = where + ": " + (axis ? "'" + text + "' is no dim" : axis.error().text);
  return allowed ? *axis : Expression::fixed(0);
}

// The end of a value range: an integer or an expression over dims.
Expression read_end(const json::value& value, const std::string& where, std::span<const Dim> dims, std::string& fault) {
  if (!value.is_string()) return Expression::fixed(integer_of(value, where, fault));
  const auto end = Expression::parse(std::string_view(value.get_string()), dims);
  if (!end && fault.empty()) fault = where + ": " + end.error().text;
  return end ? *end : Expression::fixed(0);
}

// An integer that a double holds.
bool is_exact(const json::value& value) {
  constexpr std::int64_t most = std::int64_t{1} << 53;
  const auto* number = value.if_int64();
  return number != nullptr && -most <= *number && *number <= most;
}

Tensor read_tensor(const json::value& value, const std::string& where, std::span<const Dim> dims, bool is_input,
                   std::string& fault) {
  Fields fields(value, where, fault);
  Tensor tensor;
  tensor.name = fields.text("name");
  tensor.dtype = read_dtype(fields);
  fields.each("shape", true, [&](const json::value& axis, const std::string& at) {
    tensor.shape.push_back(read_axis(axis, at, dims, !is_input, fault));
  });
  if (const auto* range = is_input ? fields.nullable("range") : nullptr) {
    const std::string at = where + ".range";
    const auto* ends = range->if_array();
    if (ends == nullptr || ends->size() != 2) fields.fail("range", "is no pair");
    if (ends != nullptr && ends->size() == 2)
      tensor.range = {read_end((*ends)[0], at + "[0]", dims, fault), read_end((*ends)[1], at + "[1]", dims, fault)};
  }
  if (const auto* pad = is_input ? fields.nullable("pad") : nullptr) {
    tensor.pad = fields.number("pad");
    if (is_integer(tensor.dtype) && !is_exact(*pad)) fields.fail("pad", "is a value that the dtype cannot hold");
  }
  fields.finish();
  return tensor;
}

Scalar scalar_of(const json::value& value, const std::string& where, std::string& fault) {
  switch (value.kind()) {
    case json::kind::null:
      return std::monostate{};
    case json::kind::bool_:
      return value.get_bool();
    case json::kind::double_:
      return value.get_double();
    case json::kind::string:
      return std::string(value.get_string());
    default:  // an integer; lists and objects are none
      return integer_of(value, where, fault);
  }
}

Constant read_constant(const json::value& value, const std::string& where, std::string& fault) {
  Fields fields(value, where, fault);
  Constant constant{fields.text("name"), std::monostate{}};
  if (const auto* given = fields.find("value")) constant.value = scalar_of(*given, where + ".value", fault);
  fields.finish();
  return constant;
}

State read_state(const json::value& value, const std::string& where, std::string& fault) {
  Fields fields(value, where, fault);
  State state{fields.text("name"), read_dtype(fields), {}};
  if (const auto* shape = fields.find("shape")) state.shape = integers_of(*shape, where + ".shape", fault);
  fields.finish();
  return state;
}

}  // namespace

Contract contract_from_json(const json::value& value, std::string& fault) {
  Fields fields(value, "contract", fault);
  Contract contract;
  const auto items = [&](std::string_view name, bool required, auto& list, auto read) {
    fields.each(name, required,
                [&](const json::value& item, const std::string& at) { list.push_back(read(item, at)); });
  };
  const auto tensor = [&](bool is_input) {
    return [&, is_input](const json::value& item, const std::string& at) {
      return read_tensor(item, at, contract.dims, is_input, fault);
    };
  };
  const auto with_fault = [&](auto read) {
    return [&, read](const json::value& item, const std::string& at) { return read(item, at, fault); };
  };
  items("dims", true, contract.dims, with_fault(read_dim));
  items("inputs", true, contract.inputs, tensor(true));
  items("outputs", true, contract.outputs, tensor(false));
  items("constants", false, contract.constants, with_fault(read_constant));
  items("state", false, contract.state, with_fault(read_state));
  if (fields.nullable("batch_dim") != nullptr) {
    const std::string name = fields.text("batch_dim");
    for (std::size_t i = 0; i < contract.dims.size(); ++i)
      if (contract.dims[i].name == name) contract.batch_dim = i;
    if (!contract.batch_dim) fields.fail("batch_dim", "is not declared");
  }
  fields.text("batch_note", false);
  contract.random = fields.boolean("random", false);
  fields.finish();
  return contract;
}

}  // namespace mctl
