// JSON that must be right: depth, numbers and keys are limited, and what is not known is refused.
#pragma once

#include <boost/json.hpp>
#include <cstdint>
#include <initializer_list>
#include <set>
#include <string>
#include <string_view>

#include "format/layout.h"
#include "format/result.h"

namespace mctl {

// Code::damaged if it is not JSON, nests deeper, an object has a key twice, or a number is no double or, where it is
// written as an integer, has more than 64 bits: what one reader would take otherwise than another.
Result<boost::json::value> parse_json(std::string_view text, std::size_t max_depth = kMaxJsonDepth);

// Reads the fields of one object. A field that is missing, of another type or not asked for is a fault; the first one
// is kept in `fault`, and reading goes on with zeros, so that callers look at it once, at the end.
class Fields {
 public:
  Fields(const boost::json::value& value, std::string where, std::string& fault);

  const boost::json::value* find(std::string_view name, bool required = true);  // nullptr: not there
  const boost::json::value* nullable(std::string_view name);                    // nullptr: not there, or null
  std::string text(std::string_view name, bool required = true);
  std::string word(std::string_view name, std::initializer_list<std::string_view> allowed);
  std::int64_t integer(std::string_view name, std::int64_t otherwise);
  std::int64_t integer(std::string_view name);
  double number(std::string_view name);
  bool boolean(std::string_view name, bool otherwise);

  // f(item, where) for each item of a list; f(key, item, where) for each of an object.
  template <class F>
  void each(std::string_view name, bool required, F f);
  template <class F>
  void each_key(std::string_view name, bool required, F f);

  void finish();  // a field that was not asked for is a fault
  void fail(std::string_view name, std::string_view what);

 private:
  std::string path(std::string_view name) const { return where_ + '.' + std::string(name); }

  const boost::json::object* object_ = nullptr;
  std::string where_;
  std::string& fault_;
  std::set<std::string_view> asked_;
};

// An item of a list, or a fault.
std::int64_t integer_of(const boost::json::value& value, const std::string& where, std::string& fault);
std::string text_of(const boost::json::value& value, const std::string& where, std::string& fault);
std::vector<std::string> texts_of(const boost::json::value& value, const std::string& where, std::string& fault);
std::vector<std::int64_t> integers_of(const boost::json::value& value, const std::string& where, std::string& fault);

template <class F>
void Fields::each(std::string_view name, bool required, F f) {
  const auto* value = find(name, required);
  if (value == nullptr) return;
  const auto* list = value->if_array();
  if (list == nullptr) return fail(name, "is no list");
  for (std::size_t i = 0; i < list->size(); ++i) f((*list)[i], path(name) + '[' + std::to_string(i) + ']');
}

template <class F>
void Fields::each_key(std::string_view name, bool required, F f) {
  const auto* value = find(name, required);
  if (value == nullptr) return;
  const auto* object = value->if_object();
  if (object == nullptr) return fail(name, "is no object");
  for (const auto& [key, item] : *object) f(std::string(key), item, path(name) + '.' + std::string(key));
}

}  // namespace mctl
