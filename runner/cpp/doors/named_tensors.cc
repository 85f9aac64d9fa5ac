#include "doors/named_tensors.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "format/elements.h"
#include "format/text.h"

namespace mctl {
namespace {

constexpr std::size_t kMostInputs = 1024, kMostAxes = 64;

// Goes over a JSON text without reading what is in it.
class Scanner {
 public:
  explicit Scanner(std::string_view text) : rest_(text) {}

  bool take(char wanted) {
    skip_space();
    if (!rest_.starts_with(wanted)) return false;
    rest_.remove_prefix(1);
    return true;
  }

  // A text with its quotes.
  std::optional<std::string_view> take_text() {
    skip_space();
    const std::size_t end = end_of_text(0);
    if (end == 0) return std::nullopt;
    return take_first(end);
  }

  // Whatever stands before the next comma or brace of this level.
  std::optional<std::string_view> take_value() {
    skip_space();
    std::size_t depth = 0, at = 0;
    while (at < rest_.size()) {
      const char c = rest_[at];
      if (depth == 0 && (c == ',' || c == '}' || c == ']')) break;
      if (c == '"') {
        const std::size_t end = end_of_text(at);
        if (end == 0) return std::nullopt;
        at = end;
        continue;
      }
      if (c == '[' || c == '{') ++depth;
      if (c == ']' || c == '}') --depth;
      ++at;
    }
    if (at == 0 || depth > 0) return std::nullopt;
    return take_first(at);
  }

  bool at_end() {
    skip_space();
    return rest_.empty();
  }

 private:
  void skip_space() { rest_.remove_prefix(std::min(rest_.find_first_not_of(" \t\r\n"), rest_.size())); }

  // Where the text that begins at `at` ends; 0: none begins there, or it has no end.
  std::size_t end_of_text(std::size_t at) const {
    if (at >= rest_.size() || rest_[at] != '"') return 0;
    for (std::size_t i = at + 1; i < rest_.size(); ++i) {
      if (rest_[i] == '\\') {
        ++i;
      } else if (rest_[i] == '"') {
        return i + 1;
      }
    }
    return 0;
  }

  std::string_view take_first(std::size_t size) {
    const std::string_view taken = rest_.substr(0, size);
    rest_.remove_prefix(size);
    return taken;
  }

  std::string_view rest_;
};

// How long the first list of each depth is; whether the others are as long is for the reader of the request to say.
std::vector<std::size_t> lengths_of(std::string_view value) {
  std::vector<std::size_t> lengths;
  std::vector<bool> counted;
  std::size_t depth = 0;
  bool item = false;  // the list at hand has one since its beginning, or the last comma
  for (const char c : value) {
    if (c == '[') {
      if (depth > 0 && !counted[depth - 1]) lengths[depth - 1] += item ? 0 : 1;
      if (lengths.size() == depth) {
        if (depth == kMostAxes) return lengths;
        lengths.push_back(0);
        counted.push_back(false);
      }
      ++depth;
      item = false;
    } else if (c == ']' && depth > 0) {
      counted[--depth] = true;
      item = true;
    } else if (c == ',') {
      item = false;
    } else if (c != ' ' && c != '\n' && c != '\t' && c != '\r' && depth > 0 && !item) {
      if (!counted[depth - 1]) ++lengths[depth - 1];
      item = true;
    }
  }
  return lengths;
}

void append_input(std::string& out, const Contract& contract, std::string_view name, std::string_view value) {
  const auto declared = std::ranges::find(contract.inputs, name.substr(1, name.size() - 2), &Tensor::name);
  const Dtype dtype = declared == contract.inputs.end() ? Dtype::f32 : declared->dtype;
  ((out += "{\"name\":") += name) += ",\"datatype\":\"";
  (out += oip_name_of(dtype)) += "\",\"shape\":[";
  const auto lengths = lengths_of(value);
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    if (i > 0) out += ',';
    out += std::to_string(lengths[i]);
  }
  out += lengths.empty() ? "],\"data\":[" : "],\"data\":";
  out += value;
  out += lengths.empty() ? "]}" : "}";
}

std::optional<std::size_t> append_nested(std::string& out, Dtype dtype, std::span<const std::int64_t> shape,
                                         std::span<const std::byte> data) {
  if (shape.empty()) return append_elements(out, dtype, data);
  out += '[';
  const auto count = static_cast<std::size_t>(shape[0]);
  if (shape.size() == 1) {
    if (const auto bad = append_elements(out, dtype, data)) return bad;
  }
  for (std::size_t i = 0; shape.size() > 1 && i < count; ++i) {
    const std::size_t size = data.size() / count;
    if (i > 0) out += ',';
    if (const auto bad = append_nested(out, dtype, shape.subspan(1), data.subspan(i * size, size))) return bad;
  }
  out += ']';
  return std::nullopt;
}

}  // namespace

Result<std::string> infer_body_from(const Contract& contract, std::string_view body) {
  const Error no_object{Code::invalid, "the body is no JSON object of tensors by name, such as {\"x\": [[1, 2]]}"};
  Scanner scanner(body);
  if (!scanner.take('{')) return no_object;
  std::string out = "{\"inputs\":[";
  const std::size_t start = out.size();
  for (std::size_t count = 0; !scanner.take('}'); ++count) {
    if (count > kMostInputs || (count > 0 && !scanner.take(','))) return no_object;
    const auto name = scanner.take_text();
    if (!name || !scanner.take(':')) return no_object;
    const auto value = scanner.take_value();
    if (!value) return no_object;
    const bool declared = std::ranges::count(contract.inputs, "inputs", &Tensor::name) > 0;
    if (*name == "\"inputs\"" && !declared) return std::string(body);
    if (out.size() > start) out += ',';
    append_input(out, contract, *name, *value);
  }
  if (!scanner.at_end()) return no_object;
  return out + "]}";
}

Result<Answer> answer_by_name(const Contract& contract, std::span<const OutputView> outputs) {
  Answer answer;
  std::string& body = answer.body;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const Tensor& declared = contract.outputs[i];
    body += i > 0 ? ',' : '{';
    append_json_string(body, declared.name);
    body += ':';
    if (append_nested(body, declared.dtype, outputs[i].shape, outputs[i].data)) {
      return Error{Code::unsayable, "output '" + declared.name +
                                        "' holds NaN or Infinity, which JSON cannot say: ask " +
                                        "for it by /v2/models/…/infer with binary_data"};
    }
  }
  body += outputs.empty() ? "{}" : "}";
  return answer;
}

}  // namespace mctl
