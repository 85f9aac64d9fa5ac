#include "format/json.h"

#include <algorithm>
#include <cmath>

namespace mctl {
namespace {

namespace json = boost::json;

// Counts the pairs that a text has, of which a parsed value holds fewer where an object repeats a key, and looks at its
// numbers as they are written.
struct Checker {
  static constexpr std::size_t max_object_size = -1, max_array_size = -1, max_key_size = -1, max_string_size = -1;
  std::size_t pairs = 0;
  bool sound = true;  // every number
  std::string begun;  // of the number at hand

  using Error = boost::system::error_code;
  bool on_document_begin(Error&) { return true; }
  bool on_document_end(Error&) { return true; }
  bool on_object_begin(Error&) { return true; }
  bool on_object_end(std::size_t size, Error&) {
    pairs += size;
    return true;
  }
  bool on_array_begin(Error&) { return true; }
  bool on_array_end(std::size_t, Error&) { return true; }
  bool on_key_part(std::string_view, std::size_t, Error&) { return true; }
  bool on_key(std::string_view, std::size_t, Error&) { return true; }
  bool on_string_part(std::string_view, std::size_t, Error&) { return true; }
  bool on_string(std::string_view, std::size_t, Error&) { return true; }
  bool on_number_part(std::string_view text, Error&) {
    begun += text;
    return true;
  }
  bool on_int64(std::int64_t, std::string_view, Error&) { return ended(true); }
  bool on_uint64(std::uint64_t, std::string_view, Error&) { return ended(false); }
  bool on_double(double value, std::string_view text, Error&) {
    begun += text;
    return ended(std::isfinite(value) && begun.find_first_of(".eE") != std::string::npos);
  }
  bool ended(bool number_is_sound) {
    sound &= number_is_sound;
    begun.clear();
    return true;
  }
  bool on_bool(bool, Error&) { return true; }
  bool on_null(Error&) { return true; }
  bool on_comment_part(std::string_view, Error&) { return true; }
  bool on_comment(std::string_view, Error&) { return true; }
};

std::size_t pairs_in(const json::value& value) {
  std::size_t pairs = 0;
  if (const auto* object = value.if_object()) {
    pairs = object->size();
    for (const auto& [key, item] : *object) pairs += pairs_in(item);
  } else if (const auto* list = value.if_array()) {
    for (const auto& item : *list) pairs += pairs_in(item);
  }
  return pairs;
}

Checker checked(std::string_view text, const json::parse_options& options) {
  json::basic_parser<Checker> parser(options);
  boost::system::error_code ignored;  // the text has been parsed before
  parser.write_some(false, text.data(), text.size(), ignored);
  return parser.handler();
}

void keep_first(std::string& fault, const std::string& where, std::string_view what) {
  if (fault.empty()) fault = where + ' ' + std::string(what);
}

}  // namespace

Result<json::value> parse_json(std::string_view text, std::size_t max_depth) {
  json::parse_options options;
  options.max_depth = max_depth;
  options.numbers = json::number_precision::precise;
  boost::system::error_code error;
  json::value value = json::parse(text, error, {}, options);
  if (error == json::error::too_deep)
    return Error{Code::damaged, "it nests more than " + std::to_string(max_depth) + " levels deep"};
  if (error) return Error{Code::damaged, "it is not JSON: " + error.message()};
  const Checker found = checked(text, options);
  if (found.pairs != pairs_in(value)) return Error{Code::damaged, "an object has the same key twice"};
  if (!found.sound) return Error{Code::damaged, "it has a number beyond 64 bits"};
  return value;
}

Fields::Fields(const json::value& value, std::string where, std::string& fault)
    : object_(value.if_object()), where_(std::move(where)), fault_(fault) {
  if (object_ == nullptr) keep_first(fault_, where_, "is no object");
}

const json::value* Fields::find(std::string_view name, bool required) {
  if (object_ == nullptr) return nullptr;
  asked_.insert(name);
  const auto* value = object_->if_contains(name);
  if (value == nullptr && required) fail(name, "is missing");
  return value;
}

const json::value* Fields::nullable(std::string_view name) {
  const auto* value = find(name, false);
  return value != nullptr && value->is_null() ? nullptr : value;
}

std::string Fields::text(std::string_view name, bool required) {
  const auto* value = find(name, required);
  return value != nullptr ? text_of(*value, path(name), fault_) : std::string();
}

std::string Fields::word(std::string_view name, std::initializer_list<std::string_view> allowed) {
  std::string word = text(name);
  if (std::ranges::find(allowed, word) == allowed.end()) fail(name, "is none of the words that are known");
  return word;
}

std::int64_t Fields::integer(std::string_view name, std::int64_t otherwise) {
  const auto* value = find(name, false);
  return value != nullptr ? integer_of(*value, path(name), fault_) : otherwise;
}

std::int64_t Fields::integer(std::string_view name) {
  const auto* value = find(name);
  return value != nullptr ? integer_of(*value, path(name), fault_) : 0;
}

double Fields::number(std::string_view name) {
  const auto* value = find(name);
  if (value == nullptr) return 0;
  boost::system::error_code error;
  const double number = value->to_number<double>(error);
  if (!error && std::isfinite(number)) return number;
  fail(name, "is no number");
  return 0;
}

bool Fields::boolean(std::string_view name, bool otherwise) {
  const auto* value = find(name, false);
  if (value == nullptr) return otherwise;
  if (!value->is_bool()) fail(name, "is no boolean");
  return value->is_bool() && value->get_bool();
}

void Fields::finish() {
  if (object_ == nullptr) return;
  for (const auto& [key, item] : *object_)
    if (!asked_.contains(key)) return fail(key, "is not known");
}

void Fields::fail(std::string_view name, std::string_view what) { keep_first(fault_, path(name), what); }

std::int64_t integer_of(const json::value& value, const std::string& where, std::string& fault) {
  if (const auto* number = value.if_int64()) return *number;
  keep_first(fault, where, "is no integer of 64 bits");
  return 0;
}

std::string text_of(const json::value& value, const std::string& where, std::string& fault) {
  if (const auto* text = value.if_string()) return std::string(*text);
  keep_first(fault, where, "is no text");
  return {};
}

std::vector<std::string> texts_of(const json::value& value, const std::string& where, std::string& fault) {
  std::vector<std::string> texts;
  const auto* list = value.if_array();
  if (list == nullptr) keep_first(fault, where, "is no list");
  if (list != nullptr)
    for (const auto& item : *list) texts.push_back(text_of(item, where, fault));
  return texts;
}

std::vector<std::int64_t> integers_of(const json::value& value, const std::string& where, std::string& fault) {
  std::vector<std::int64_t> integers;
  const auto* list = value.if_array();
  if (list == nullptr) keep_first(fault, where, "is no list");
  if (list != nullptr)
    for (const auto& item : *list) integers.push_back(integer_of(item, where, fault));
  return integers;
}

}  // namespace mctl
