#include "registry/reading.h"

#include <algorithm>
#include <charconv>
#include <functional>
#include <set>

namespace mctl {
namespace {

namespace json = boost::json;

constexpr std::size_t kMostShown = 60;  // bytes of a value

// Walks over JSON that has been parsed before, and tells of each value its path, as faults name it, and its line.
class Walk {
 public:
  using Visit = std::function<void(const std::string& path, std::size_t line, bool repeated)>;
  Walk(std::string_view text, Visit visit) : text_(text), visit_(std::move(visit)) { value("", false); }

 private:
  void value(const std::string& path, bool repeated) {
    blanks();
    visit_(path, line_, repeated);
    if (peek() == '{') return object(path);
    if (peek() == '[') return list(path);
    if (peek() == '"') return static_cast<void>(string());
    while (at_ < text_.size() && std::string_view(",]} \t\r\n").find(text_[at_]) == std::string_view::npos) ++at_;
  }

  void object(const std::string& path) {
    std::set<std::string> keys;
    for (char next = enter(); next != '}' && next != 0; next = after()) {
      const std::string key = string();
      blanks();
      ++at_;  // the colon
      value(path.empty() ? key : path + '.' + key, !keys.insert(key).second);
    }
    ++at_;
  }

  void list(const std::string& path) {
    std::size_t index = 0;
    for (char next = enter(); next != ']' && next != 0; next = after())
      value(path + '[' + std::to_string(index++) + ']', false);
    ++at_;
  }

  std::string string() {
    const std::size_t begin = at_++;
    while (peek() != '"' && peek() != 0) at_ += peek() == '\\' ? 2 : 1;
    ++at_;
    boost::system::error_code error;
    const json::value whole = json::parse(text_.substr(begin, at_ - begin), error);
    return whole.is_string() ? std::string(whole.get_string()) : std::string();
  }

  char enter() {
    ++at_;
    return blanks();
  }
  char after() {
    if (blanks() == ',') ++at_;
    return blanks();
  }
  char blanks() {
    for (; std::string_view(" \t\r\n").find(peek()) != std::string_view::npos && peek() != 0; ++at_)
      line_ += peek() == '\n';
    return peek();
  }
  char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }

  std::string_view text_;
  Visit visit_;
  std::size_t at_ = 0, line_ = 1;
};

}  // namespace

void keep_fault(std::string& fault, std::string_view where, std::string_view what) {
  if (fault.empty()) fault = (where.empty() ? "the document" : std::string(where)) + ' ' + std::string(what);
}

std::string shown(const json::value& value) {
  std::string text = json::serialize(value);
  if (text.size() <= kMostShown) return text;
  text.resize(kMostShown);
  return text + "…";
}

std::string listed(std::span<const std::string_view> words) {
  std::string text;
  for (std::size_t i = 0; i < words.size(); ++i)
    text += (i == 0 ? "`" : i + 1 == words.size() ? " or `" : ", `") + std::string(words[i]) + '`';
  return text;
}

std::int64_t integer_in(const json::value& value, std::int64_t least, std::int64_t most, const std::string& where,
                        std::string& fault) {
  const auto* number = value.if_int64();
  if (number != nullptr && least <= *number && *number <= most) return *number;
  keep_fault(fault, where, "is " + shown(value) + ", allowed " + std::to_string(least) + ".." + std::to_string(most));
  return least;
}

double number_in(const json::value& value, double least, double most, const std::string& where, std::string& fault) {
  boost::system::error_code error;
  const double number = value.to_number<double>(error);
  if (!error && least <= number && number <= most) return number;
  keep_fault(fault, where, "is " + shown(value) + ", allowed " + text_of_number(least) + ".." + text_of_number(most));
  return least;
}

void only_fields(const json::value& value, std::initializer_list<std::string_view> allowed, const std::string& where,
                 std::string& fault) {
  const auto* object = value.if_object();
  if (object == nullptr) return keep_fault(fault, where, "is no object");
  for (const auto& [key, item] : *object)
    if (std::ranges::find(allowed, std::string_view(key)) == allowed.end())
      return keep_fault(fault, (where.empty() ? "" : where + '.') + std::string(key),
                        "is not known: allowed are " + listed(allowed));
}

std::string text_of_number(double value) {
  char text[32];
  return {text, std::to_chars(text, text + sizeof text, value).ptr};
}

std::size_t line_of_fault(std::string_view text, std::string_view fault) {
  std::size_t found = 0, longest = 0;
  Walk(text, [&](const std::string& path, std::size_t line, bool) {
    const bool begins = fault.starts_with(path) && path.size() < fault.size() &&
                        std::string_view(" .[").find(fault[path.size()]) != std::string_view::npos;
    if (!begins || path.size() <= longest) return;
    longest = path.size();
    found = line;
  });
  return found;
}

std::size_t line_of_second_key(std::string_view text) {
  std::size_t found = 0;
  Walk(text, [&](const std::string&, std::size_t line, bool repeated) {
    if (repeated && found == 0) found = line;
  });
  return found;
}

}  // namespace mctl
