#include "doors/oip_json.h"

#include <algorithm>
#include <array>
#include <boost/json/basic_parser_impl.hpp>

namespace mctl {
namespace {

namespace json = boost::json;
using boost::system::error_code;

constexpr std::size_t kMaxTensors = 1024, kMaxAxes = 64, kMaxKeys = 256;
constexpr std::size_t kMaxId = 1024;  // bytes of an id, which the answer repeats

// What the value at hand belongs to.
enum class Place : std::uint8_t {
  document,
  request,
  inputs,
  input,
  shape,
  data,
  outputs,
  output,
  request_parameters,
  input_parameters,
  output_parameters,
  ignored,
};

enum class Key : std::uint8_t { none, id, inputs, outputs, parameters, name, shape, datatype, data, other };

constexpr std::string_view kRequest =
    R"(an object: {"inputs":[{"name":"...","shape":[...],"datatype":"FP32","data":[...]}]})";

constexpr std::string_view kKeys = "a key of a request: those are id, inputs, outputs and parameters";

Key key_of(std::string_view text) {
  constexpr std::array<std::string_view, 9> names = {"",     "id",    "inputs",   "outputs", "parameters",
                                                     "name", "shape", "datatype", "data"};
  const auto found = std::find(names.begin() + 1, names.end(), text);
  return found == names.end() ? Key::other : static_cast<Key>(found - names.begin());
}

// Data whose datatype stands behind it is passed over; `again` asks for a second reading with what is known then.
class Handler {
 public:
  static constexpr std::size_t max_object_size = 1 << 20, max_array_size = -1, max_key_size = 1 << 10,
                               max_string_size = 1 << 16;

  Handler(InferJson& out, std::size_t limit) : out_(out), limit_(limit) {}

  std::optional<Error> error;
  bool again = false;

  void read_again() {
    again = false;
    second_ = true;
    input_ = 0;
    stack_.clear();
    keys_.clear();
  }

  bool on_document_begin(error_code&) { return enter(Place::document); }
  bool on_document_end(error_code&) { return true; }
  bool on_object_begin(error_code& ec);
  bool on_object_end(std::size_t, error_code& ec);
  bool on_array_begin(error_code& ec);
  bool on_array_end(std::size_t count, error_code& ec);
  bool on_key_part(json::string_view part, std::size_t, error_code&) { return text_ += part, true; }
  bool on_key(json::string_view part, std::size_t, error_code& ec);
  bool on_string_part(json::string_view part, std::size_t, error_code&) { return text_ += part, true; }
  bool on_string(json::string_view part, std::size_t, error_code& ec);
  bool on_number_part(json::string_view, error_code&) { return true; }
  bool on_int64(std::int64_t value, json::string_view text, error_code& ec);
  bool on_uint64(std::uint64_t value, json::string_view, error_code& ec);
  bool on_double(double value, json::string_view, error_code& ec);
  bool on_bool(bool value, error_code& ec);
  bool on_null(error_code& ec);
  bool on_comment_part(json::string_view, error_code&) { return true; }
  bool on_comment(json::string_view, error_code&) { return true; }

 private:
  bool enter(Place place) { return stack_.push_back(place), true; }
  Place place() const { return stack_.back(); }
  bool fail(error_code& ec, std::string text, Code code = Code::invalid);
  bool wrong(error_code& ec, std::string_view wanted);
  bool mistyped(error_code& ec) { return wrong(ec, wanted()); }
  std::string_view wanted() const;
  std::string where() const;

  bool begin_data();
  bool number(const JsonNumber& number, error_code& ec);
  bool scalar(Scalar value, error_code& ec);
  bool request_value(Scalar& value, error_code& ec);
  bool input_value(Scalar& value, error_code& ec);
  bool output_value(Scalar& value, error_code& ec);
  bool request_parameter(Scalar& value, error_code& ec);
  bool input_parameter(const Scalar& value, error_code& ec);
  bool output_parameter(const Scalar& value, error_code& ec);
  bool axis(const JsonNumber& number, error_code& ec);
  bool element(const JsonNumber& number, error_code& ec);

  JsonInput& input() { return out_.inputs[input_ - 1]; }

  InferJson& out_;
  const std::size_t limit_;
  bool second_ = false;  // the second reading: only data that was passed over is looked at
  bool skips_data_ = false;
  std::size_t input_ = 0;  // inputs begun
  std::vector<Place> stack_;
  std::vector<std::vector<std::string>> keys_;  // of the objects that are open, to find doubles
  std::string text_, parameter_;
  Key key_ = Key::none;
  std::vector<std::int64_t> open_;  // items so far of the lists of `data` that are open
};

bool Handler::fail(error_code& ec, std::string text, Code code) {
  error = Error{code, std::move(text)};
  ec = json::make_error_code(json::error::exception);
  return false;
}

bool Handler::wrong(error_code& ec, std::string_view wanted) {
  return fail(ec, where() + " is not " + std::string(wanted));
}

// What the value at hand has to be.
std::string_view Handler::wanted() const {
  constexpr std::array<std::string_view, 10> of_key = {
      kRequest,   "a string",        "a list of objects", "a list of objects", "an object",
      "a string", "a list of sizes", "a string",          "a list of numbers", "expected"};
  const Place at = place();
  if (at == Place::document) return kRequest;
  if (at == Place::inputs || at == Place::outputs) return "an object";
  if (at == Place::request && key_ >= Key::name) return kKeys;
  return of_key[static_cast<std::size_t>(key_)];
}

// What a person would call the value at hand.
std::string Handler::where() const {
  constexpr std::array<std::string_view, 10> names = {"the request", "id",    "inputs",   "outputs", "parameters",
                                                      "name",        "shape", "datatype", "data",    "a value"};
  const Place at = place();
  const bool in_input = at == Place::input || at == Place::shape || at == Place::data || at == Place::input_parameters;
  std::string text;
  if (in_input && input_ > 0) {
    const auto& known = out_.inputs[input_ - 1].name;
    text = known ? "input '" + *known + "': " : "input " + std::to_string(input_ - 1) + ": ";
  }
  if (at == Place::output || at == Place::output_parameters) text = "an output: ";
  if (at >= Place::request_parameters) return text + "parameter '" + parameter_ + "'";
  if (at == Place::inputs) return "an item of inputs";
  if (at == Place::outputs) return "an item of outputs";
  return text + std::string(names[static_cast<std::size_t>(key_)]);
}

// --- structure
// --------------------------------------------------------------------------------------------------------

bool Handler::on_object_begin(error_code& ec) {
  keys_.emplace_back();
  switch (place()) {
    case Place::document:
      return enter(Place::request);
    case Place::inputs:
      if (++input_ > kMaxTensors) return fail(ec, "too many inputs");
      if (!second_) out_.inputs.emplace_back();
      return enter(Place::input);
    case Place::outputs:
      if (out_.outputs.size() >= kMaxTensors) return fail(ec, "too many outputs");
      if (!second_) out_.outputs.emplace_back();
      return enter(Place::output);
    case Place::request:
    case Place::input:
    case Place::output:
      if (key_ == Key::other) return enter(Place::ignored);
      if (key_ != Key::parameters) return mistyped(ec);
      return enter(place() == Place::request ? Place::request_parameters
                   : place() == Place::input ? Place::input_parameters
                                             : Place::output_parameters);
    case Place::shape:
    case Place::data:
      return wrong(ec, "a list of numbers");
    default:
      return enter(Place::ignored);
  }
}

bool Handler::on_object_end(std::size_t, error_code&) {
  keys_.pop_back();
  stack_.pop_back();
  return true;
}

bool Handler::on_array_begin(error_code& ec) {
  switch (place()) {
    case Place::request:
      if (key_ == Key::inputs) return enter(Place::inputs);
      if (key_ == Key::outputs) return enter(Place::outputs);
      return key_ == Key::other ? enter(Place::ignored) : mistyped(ec);
    case Place::input:
      if (key_ == Key::shape) {
        if (!second_) input().shape.emplace();
        return enter(Place::shape);
      }
      if (key_ == Key::data) return begin_data();
      return key_ == Key::other ? enter(Place::ignored) : mistyped(ec);
    case Place::data:
      ++open_.back();
      open_.push_back(0);
      return enter(Place::data);
    case Place::output:
      return key_ == Key::other ? enter(Place::ignored) : mistyped(ec);
    case Place::document:
    case Place::inputs:
    case Place::outputs:
    case Place::shape:
      return mistyped(ec);
    default:
      return enter(Place::ignored);
  }
}

bool Handler::begin_data() {
  JsonInput& mine = input();
  skips_data_ = !mine.dtype || (second_ && !mine.lengths.empty());
  if (skips_data_ && !second_) again = true;
  mine.has_data = true;
  open_.assign(1, 0);
  return enter(Place::data);
}

// Lists of one depth have to be of one length.
bool Handler::on_array_end(std::size_t count, error_code& ec) {
  const Place left = place();
  stack_.pop_back();
  if (left != Place::data) return true;
  const std::size_t depth = open_.size() - 1;
  open_.pop_back();
  if (skips_data_) return true;
  auto& lengths = input().lengths;
  if (lengths.size() <= depth) lengths.resize(depth + 1, -1);
  const auto length = static_cast<std::int64_t>(count);
  if (lengths[depth] >= 0 && lengths[depth] != length) {
    return fail(ec, where() + " is ragged: lists of " + std::to_string(lengths[depth]) + " and " +
                        std::to_string(length) + " items side by side");
  }
  lengths[depth] = length;
  return true;
}

bool Handler::on_key(json::string_view part, std::size_t, error_code& ec) {
  text_ += part;
  if (place() != Place::ignored) {
    auto& seen = keys_.back();
    if (std::find(seen.begin(), seen.end(), text_) != seen.end()) return fail(ec, "key '" + text_ + "' twice");
    if (seen.size() >= kMaxKeys) return fail(ec, "too many keys in one object");
    seen.push_back(text_);
    key_ = key_of(text_);
    if (place() >= Place::request_parameters) parameter_ = text_;
  }
  text_.clear();
  return true;
}

// --- values
// -----------------------------------------------------------------------------------------------------------

bool Handler::on_string(json::string_view part, std::size_t, error_code& ec) {
  text_ += part;
  std::string value;
  value.swap(text_);
  return scalar(std::move(value), ec);
}

bool Handler::on_int64(std::int64_t value, json::string_view text, error_code& ec) {
  JsonNumber number{value < 0 ? JsonNumber::negative : JsonNumber::natural, {}};
  if (value < 0) {
    number.below = value;
  } else {
    number.above = static_cast<std::uint64_t>(value);
  }
  if (value == 0 && text.starts_with('-')) number = {JsonNumber::real, {.value = -0.0}};
  return this->number(number, ec);
}

bool Handler::on_uint64(std::uint64_t value, json::string_view, error_code& ec) {
  return number({JsonNumber::natural, {.above = value}}, ec);
}

bool Handler::on_double(double value, json::string_view, error_code& ec) {
  return number({JsonNumber::real, {.value = value}}, ec);
}

bool Handler::on_bool(bool value, error_code& ec) {
  if (place() == Place::data) return element({JsonNumber::boolean, {.truth = value}}, ec);
  return scalar(value, ec);
}

bool Handler::on_null(error_code& ec) {
  if (place() == Place::data) return wrong(ec, "a list of numbers");
  return scalar(std::monostate{}, ec);
}

bool Handler::number(const JsonNumber& number, error_code& ec) {
  if (place() == Place::data) return element(number, ec);
  if (place() == Place::shape) return axis(number, ec);
  if (number.kind == JsonNumber::negative) return scalar(number.below, ec);
  if (number.kind == JsonNumber::natural && std::in_range<std::int64_t>(number.above)) {
    return scalar(static_cast<std::int64_t>(number.above), ec);
  }
  return scalar(number.kind == JsonNumber::real ? number.value : static_cast<double>(number.above), ec);
}

bool Handler::axis(const JsonNumber& number, error_code& ec) {
  if (second_) return true;
  auto& shape = *input().shape;
  const bool fits = number.kind == JsonNumber::natural && std::in_range<std::int64_t>(number.above);
  if (!fits) return wrong(ec, "a list of sizes");
  if (shape.size() >= kMaxAxes) return fail(ec, where() + " has too many axes");
  shape.push_back(static_cast<std::int64_t>(number.above));
  return true;
}

bool Handler::element(const JsonNumber& number, error_code& ec) {
  ++open_.back();
  if (skips_data_) return true;
  JsonInput& mine = input();
  if (mine.count >= limit_) return ++mine.count, true;  // no input is as large: the contract's check will say so
  const std::size_t size = item_size(*mine.dtype);
  if (mine.data.size() < (mine.count + 1) * size)
    mine.data.resize(std::max<std::size_t>(2 * mine.data.size(), 64 * size));
  if (!store(*mine.dtype, number, mine.data.data() + mine.count * size)) {
    return fail(
        ec, where() + ": element " + std::to_string(mine.count) + " is no " + std::string(oip_name_of(*mine.dtype)));
  }
  ++mine.count;
  return true;
}

bool Handler::scalar(Scalar value, error_code& ec) {
  if (second_) return place() == Place::data ? wrong(ec, "a list of numbers") : true;
  switch (place()) {
    case Place::request:
      return request_value(value, ec);
    case Place::input:
      return input_value(value, ec);
    case Place::output:
      return output_value(value, ec);
    case Place::request_parameters:
      return request_parameter(value, ec);
    case Place::input_parameters:
      return input_parameter(value, ec);
    case Place::output_parameters:
      return output_parameter(value, ec);
    case Place::ignored:
      return true;
    case Place::shape:
      return wrong(ec, "a list of sizes");
    case Place::data:
      return wrong(ec, "a list of numbers");
    default:
      return mistyped(ec);
  }
}

bool Handler::request_value(Scalar& value, error_code& ec) {
  if (key_ == Key::other || std::holds_alternative<std::monostate>(value)) return true;
  if (key_ != Key::id) return mistyped(ec);
  auto* text = std::get_if<std::string>(&value);
  if (!text) return wrong(ec, "a string");
  if (text->size() > kMaxId) return wrong(ec, "of at most " + std::to_string(kMaxId) + " bytes");
  out_.id = std::move(*text);
  return true;
}

bool Handler::input_value(Scalar& value, error_code& ec) {
  if (key_ == Key::other) return true;
  auto* text = std::get_if<std::string>(&value);
  if (key_ == Key::shape || key_ == Key::data || key_ == Key::parameters) return mistyped(ec);
  if (!text) return wrong(ec, "a string");
  if (key_ == Key::name) input().name = std::move(*text);
  if (key_ == Key::datatype) {
    input().dtype = dtype_from_oip(*text);
    if (!input().dtype) return fail(ec, where() + " '" + *text + "' is not supported");
  }
  return true;
}

bool Handler::output_value(Scalar& value, error_code& ec) {
  if (key_ == Key::other) return true;
  auto* text = std::get_if<std::string>(&value);
  if (key_ != Key::name || !text) return mistyped(ec);
  out_.outputs.back().name = std::move(*text);
  return true;
}

// --- parameters
// -------------------------------------------------------------------------------------------------------

bool Handler::request_parameter(Scalar& value, error_code& ec) {
  const auto* number = std::get_if<std::int64_t>(&value);
  const auto* truth = std::get_if<bool>(&value);
  if (parameter_ == "timeout") {
    if (!number || *number < 1) return wrong(ec, "a positive number of microseconds");
    out_.timeout_us = *number;
  } else if (parameter_ == "binary_data_output") {
    if (!truth) return wrong(ec, "true or false");
    out_.binary_output = *truth;
  } else if (parameter_.starts_with("sequence_")) {
    const bool nothing = (truth && !*truth) || (number && *number == 0);
    if (!nothing) return fail(ec, where() + ": sequences are not implemented", Code::unimplemented);
  } else {
    out_.parameters.emplace_back(parameter_, std::move(value));
  }
  return true;
}

bool Handler::input_parameter(const Scalar& value, error_code& ec) {
  if (parameter_.starts_with("shared_memory_")) {
    return fail(ec, where() + ": shared memory is not implemented", Code::unimplemented);
  }
  if (parameter_ != "binary_data_size") return true;
  const auto* number = std::get_if<std::int64_t>(&value);
  if (!number || *number < 0) return wrong(ec, "a number of bytes");
  input().binary_size = static_cast<std::uint64_t>(*number);
  return true;
}

bool Handler::output_parameter(const Scalar& value, error_code& ec) {
  if (parameter_.starts_with("shared_memory_") || parameter_ == "classification") {
    return fail(ec, where() + " is not implemented", Code::unimplemented);
  }
  if (parameter_ != "binary_data") return true;
  const auto* truth = std::get_if<bool>(&value);
  if (!truth) return wrong(ec, "true or false");
  out_.outputs.back().binary = *truth;
  return true;
}

Status read(json::basic_parser<Handler>& parser, std::string_view text) {
  error_code ec;
  const std::size_t used = parser.write_some(false, text.data(), text.size(), ec);
  if (parser.handler().error) return *parser.handler().error;
  if (!ec && used < text.size()) ec = json::make_error_code(json::error::extra_data);
  if (ec) return Error{Code::invalid, "malformed JSON: " + ec.message()};
  return Done{};
}

}  // namespace

Result<InferJson> parse_infer_json(std::string_view text, std::size_t limit) {
  InferJson out;
  json::parse_options options;
  options.numbers = json::number_precision::precise;
  json::basic_parser<Handler> parser(options, out, limit);
  if (auto done = read(parser, text); !done) return done.error();
  if (parser.handler().again) {
    parser.handler().read_again();
    parser.reset();
    if (auto done = read(parser, text); !done) return done.error();
  }
  return out;
}

}  // namespace mctl
