#include "doors/oip_request.h"

#include <algorithm>
#include <charconv>

#include "doors/oip_json.h"

namespace mctl {
namespace {

using std::to_string;

Error invalid(std::string text) { return {Code::invalid, std::move(text)}; }

std::string text_of(std::span<const std::int64_t> shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) text += (i ? "," : "") + to_string(shape[i]);
  return text + "]";
}

// The largest number of elements that one input can have.
std::size_t most_elements(const Contract& contract, std::int64_t max_rows) {
  DimSizes largest;
  for (const Dim& dim : contract.dims) largest.push_back(dim.max);
  if (contract.batch_dim) largest[*contract.batch_dim] = std::max(largest[*contract.batch_dim], max_rows);
  std::size_t most = 1;
  for (const Tensor& input : contract.inputs) {
    const auto bytes = bytes_of(input, largest);
    most = std::max(most, bytes ? *bytes / item_size(input.dtype) : SIZE_MAX);
  }
  return most;
}

Result<std::size_t> product(const std::string& name, std::span<const std::int64_t> shape) {
  std::size_t count = 1;
  for (const std::int64_t size : shape) {
    if (__builtin_mul_overflow(count, static_cast<std::size_t>(size), &count)) {
      return invalid("input '" + name + "': shape " + text_of(shape) + " is too large");
    }
  }
  return count;
}

// Lists of numbers are flat, or nested as the shape is.
Status check_nesting(const std::string& name, const JsonInput& from, std::size_t count) {
  const bool flat = from.lengths.size() == 1;
  if ((!flat && from.lengths != *from.shape) || from.count != count) {
    const std::string came = flat ? to_string(from.count) + " elements" : "lists of shape " + text_of(from.lengths);
    return invalid("input '" + name + "': data has " + came + ", its shape is " + text_of(*from.shape));
  }
  return Done{};
}

Status take_binary(InferRequest::Input& input, const JsonInput& from, std::size_t count,
                   std::span<const std::byte>& rest) {
  const std::string quoted = "input '" + input.name + "': ";
  std::size_t bytes = 0;
  if (from.has_data) return invalid(quoted + "has both data and binary_data_size");
  if (__builtin_mul_overflow(count, item_size(input.dtype), &bytes) || bytes != *from.binary_size) {
    return invalid(quoted + "binary_data_size is " + to_string(*from.binary_size) + ", " +
                   std::string(oip_name_of(input.dtype)) + " of shape " + text_of(input.shape) + " has " +
                   to_string(bytes));
  }
  if (bytes > rest.size()) return invalid(quoted + "the body ends before its " + to_string(bytes) + " bytes");
  input.data = rest.first(bytes);
  rest = rest.subspan(bytes);
  return Done{};
}

Status check_booleans(const InferRequest::Input& input) {
  if (input.dtype != Dtype::boolean) return Done{};
  const auto odd = std::find_if(input.data.begin(), input.data.end(), [](std::byte b) { return b > std::byte{1}; });
  if (odd == input.data.end()) return Done{};
  return invalid("input '" + input.name + "': element " + to_string(odd - input.data.begin()) + " is " +
                 to_string(static_cast<int>(*odd)) + ", allowed 0 or 1");
}

Result<InferRequest::Input> take_input(const Contract& contract, JsonInput& from, std::size_t index,
                                       std::span<const std::byte>& rest) {
  InferRequest::Input input;
  if (!from.name) return invalid("input " + to_string(index) + " has no name");
  input.name = std::move(*from.name);
  if (const auto at = position(contract.inputs, "INPUT__", input.name)) input.name = contract.inputs[*at].name;
  if (!from.dtype) return invalid("input '" + input.name + "' has no datatype");
  if (!from.shape) return invalid("input '" + input.name + "' has no shape");
  input.dtype = *from.dtype;
  const auto count = product(input.name, *from.shape);
  if (!count) return count.error();
  input.shape = *from.shape;
  if (from.binary_size) {
    if (auto taken = take_binary(input, from, *count, rest); !taken) return taken.error();
  } else {
    if (!from.has_data) return invalid("input '" + input.name + "' has no data");
    if (auto fits = check_nesting(input.name, from, *count); !fits) return fits.error();
    const std::size_t bytes = *count * item_size(input.dtype);
    from.data.resize(bytes <= from.data.size() ? bytes : 0);
    input.parsed = std::move(from.data);
    input.data = input.parsed;
  }
  if (auto sound = check_booleans(input); !sound) return sound.error();
  return input;
}

Status choose_outputs(const Contract& contract, const InferJson& from, InferRequest& to) {
  for (const JsonOutput& wanted : from.outputs) {
    if (!wanted.name) return invalid("an output has no name");
    const auto at = position(contract.outputs, "OUTPUT__", *wanted.name);
    if (!at) return invalid("unknown output '" + *wanted.name + "'");
    const auto same = [&](const InferRequest::Output& output) { return output.index == *at; };
    if (std::any_of(to.outputs.begin(), to.outputs.end(), same)) {
      return invalid("output '" + *wanted.name + "' is asked for twice");
    }
    to.outputs.push_back({*at, *wanted.name, wanted.binary.value_or(from.binary_output)});
  }
  if (!from.outputs.empty()) return Done{};
  for (std::size_t i = 0; i < contract.outputs.size(); ++i) {
    to.outputs.push_back({i, contract.outputs[i].name, from.binary_output});
  }
  return Done{};
}

Result<InferRequest> from_json(const Contract& contract, InferJson json, std::span<const std::byte> rest) {
  InferRequest request;
  for (std::size_t i = 0; i < json.inputs.size(); ++i) {
    auto input = take_input(contract, json.inputs[i], i, rest);
    if (!input) return input.error();
    request.inputs.push_back(std::move(*input));
  }
  if (!rest.empty()) return invalid("the body is " + to_string(rest.size()) + " bytes longer than its tensors");
  if (auto chosen = choose_outputs(contract, json, request); !chosen) return chosen.error();
  for (auto& [name, value] : json.parameters) {
    if (std::ranges::count(contract.constants, name, &Constant::name) > 0) {
      request.parameters.emplace_back(name, std::move(value));
    }
  }
  request.id = std::move(json.id);
  request.timeout_us = json.timeout_us;
  return request;
}

// The shape of the one input, given its bytes: at most one axis is free.
Result<std::vector<std::int64_t>> raw_shape(const Tensor& input, std::size_t bytes) {
  std::vector<std::int64_t> shape;
  std::optional<std::size_t> open;
  std::size_t fixed = item_size(input.dtype);
  for (const Expression& axis : input.shape) {
    if (!axis.constant()) {
      if (open) return invalid("a raw request needs an input with one dynamic axis at most: send JSON and binary");
      open = shape.size();
    }
    shape.push_back(axis.constant().value_or(1));
    fixed *= static_cast<std::size_t>(shape.back());
  }
  const bool whole = fixed > 0 && (open ? bytes % fixed == 0 : bytes == fixed);
  if (!whole) {
    return invalid("input '" + input.name + "': the body has " + to_string(bytes) + " bytes, no " + signature(input));
  }
  if (open) shape[*open] = static_cast<std::int64_t>(bytes / fixed);
  return shape;
}

Result<InferRequest> raw_request(const Contract& contract, std::span<const std::byte> body) {
  if (contract.inputs.size() != 1) return invalid("a raw request needs a model with one input");
  const Tensor& declared = contract.inputs.front();
  auto shape = raw_shape(declared, body.size());
  if (!shape) return shape.error();
  InferRequest request;
  request.inputs.push_back({declared.name, declared.dtype, std::move(*shape), body, {}});
  if (auto sound = check_booleans(request.inputs.front()); !sound) return sound.error();
  for (std::size_t i = 0; i < contract.outputs.size(); ++i) {
    request.outputs.push_back({i, contract.outputs[i].name, true});
  }
  return request;
}

}  // namespace

Result<InferRequest> parse_infer(const Contract& contract, std::span<const std::byte> body,
                                 std::optional<std::uint64_t> json_length, std::int64_t max_rows) {
  if (json_length == 0u) return raw_request(contract, body);
  const std::uint64_t length = json_length.value_or(body.size());
  if (length > body.size()) {
    return invalid("Inference-Header-Content-Length is no number within the body's " + to_string(body.size()) +
                   " bytes");
  }
  const std::string_view text(reinterpret_cast<const char*>(body.data()), length);
  auto json = parse_infer_json(text, most_elements(contract, max_rows));
  if (!json) return json.error();
  return from_json(contract, std::move(*json), body.subspan(length));
}

std::optional<std::size_t> position(std::span<const Tensor> tensors, std::string_view alias, std::string_view name) {
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].name == name) return i;
  }
  if (!name.starts_with(alias)) return std::nullopt;
  name.remove_prefix(alias.size());
  std::size_t index = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), index);
  const bool number = error == std::errc{} && end == name.data() + name.size();
  return number && index < tensors.size() ? std::optional(index) : std::nullopt;
}

}  // namespace mctl
