#include "registry/serve_toml.h"

#include <algorithm>
#include <charconv>
#include <string>

#include "format/text.h"

namespace mctl {
namespace {

namespace json = boost::json;

constexpr std::size_t kMaxText = 1 << 20;
constexpr int kMaxDepth = 8;

bool is_key(char c) {
  return ('a' <= c && c <= 'z') || ('A' <= c && c <= 'Z') || ('0' <= c && c <= '9') || c == '_' || c == '-';
}

// Reads the text to its end, or to the first fault.
class Toml {
 public:
  explicit Toml(std::string_view text) : text_(text) {}

  // The settings; each is judged with the line at hand.
  Result<SettingsLayer> settings() {
    json::object all;
    for (skip_lines(); fault_.empty() && !ended(); skip_lines()) {
      if (peek() == '[') return failed("a table has no meaning here: write `name = value`");
      const std::size_t line = line_;
      const std::string key = pair(all);
      if (fault_.empty() && !ends_line()) fail("there is more behind the value of `" + key + '`');
      if (!fault_.empty()) break;
      std::string fault;
      settings_from_json({{key, all.at(key)}}, "", fault);
      if (fault.empty()) continue;
      line_ = line;
      return failed(fault.starts_with('.') ? fault.substr(1) : fault);
    }
    if (!fault_.empty()) return failed(fault_);
    std::string fault;
    return settings_from_json(all, "", fault);
  }

 private:
  // `key = value`, put into `into`; returns the key.
  std::string pair(json::object& into) {
    const std::string key = name();
    skip_blanks();
    if (fault_.empty() && !take('=')) fail("`" + key + "` has no value: write `" + key + " = …`");
    skip_blanks();
    const json::value is = value();
    if (into.contains(key)) fail("`" + key + "` is there twice");
    if (fault_.empty()) into[key] = is;
    return key;
  }

  std::string name() {
    if (peek() == '"' || peek() == '\'') return text();
    const std::size_t begin = at_;
    while (!ended() && is_key(peek())) ++at_;
    if (at_ == begin) fail("here is no name of a setting");
    return std::string(text_.substr(begin, at_ - begin));
  }

  json::value value() {
    if (++depth_ > kMaxDepth) return fail("it nests too deep"), nullptr;
    json::value is = peek() == '"' || peek() == '\'' ? json::value(text())
                     : peek() == '['                 ? list()
                     : peek() == '{'                 ? table()
                                                     : word();
    --depth_;
    return is;
  }

  json::value list() {
    json::array items;
    for (++at_; fault_.empty();) {
      skip_lines();
      if (take(']')) return items;
      items.push_back(value());
      skip_lines();
      if (!take(',') && peek() != ']') fail("a list goes on with `,` or ends with `]`");
    }
    return nullptr;
  }

  json::value table() {
    json::object fields;
    for (++at_; fault_.empty();) {
      skip_blanks();
      if (fields.empty() && take('}')) return fields;
      pair(fields);
      skip_blanks();
      if (take('}')) return fields;
      if (!take(',')) fail("`{` goes on with `,` or ends with `}` on its line");
    }
    return nullptr;
  }

  std::string text() {
    const char quote = peek();
    if (text_.substr(at_).starts_with(std::string(3, quote)))
      return fail("texts of several lines have no meaning here"), "";
    std::string content;
    for (++at_; !ended() && peek() != quote; ++at_) {
      if (peek() == '\n') break;
      if (peek() == '\\' && quote == '"') return fail("write texts with `\\` in single quotes"), "";
      content += peek();
    }
    if (!take(quote)) fail("a text does not end on its line");
    return content;
  }

  // true, false, or a whole number.
  json::value word() {
    const std::size_t begin = at_;
    while (!ended() && (is_key(peek()) || peek() == '+' || peek() == '.' || peek() == ':')) ++at_;
    std::string word(text_.substr(begin, at_ - begin));
    if (word == "true" || word == "false") return word == "true";
    const bool split_well = !word.starts_with('_') && !word.ends_with('_') && word.find("__") == std::string::npos;
    std::string digits = word.starts_with('+') ? word.substr(1) : word;
    std::erase(digits, '_');
    std::int64_t number = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
    const bool whole = error == std::errc() && end == digits.data() + digits.size() && !digits.empty();
    if (!whole || !split_well)
      fail("a value is a whole number, a text in quotes, true, false, a list, or `{min = 1, max = 2}`");
    return number;
  }

  bool ended() const { return at_ >= text_.size(); }
  char peek() const { return ended() ? '\0' : text_[at_]; }
  bool take(char c) {
    if (ended() || peek() != c) return false;
    ++at_;
    return true;
  }

  void skip_blanks() {
    while (peek() == ' ' || peek() == '\t') ++at_;
  }
  // Blanks, comments and ends of lines.
  void skip_lines() {
    for (skip_blanks(); !ended() && (peek() == '#' || peek() == '\n' || peek() == '\r'); skip_blanks()) {
      if (peek() == '#')
        at_ = std::min(text_.find('\n', at_), text_.size());
      else
        line_ += text_[at_++] == '\n';
    }
  }
  bool ends_line() {
    skip_blanks();
    return ended() || peek() == '#' || peek() == '\n' || peek() == '\r';
  }

  void fail(std::string what) {
    if (fault_.empty()) fault_ = std::move(what);
  }
  Error failed(std::string_view what) const {
    return {Code::usage, "line " + std::to_string(line_) + ": " + printable(what)};
  }

  std::string_view text_;
  std::size_t at_ = 0, line_ = 1;
  int depth_ = 0;
  std::string fault_;  // the first
};

}  // namespace

Result<SettingsLayer> parse_serve_toml(std::string_view text) {
  if (text.size() > kMaxText || !is_utf8(text)) return Error{Code::usage, "it is no text of at most 1 MiB"};
  return Toml(text).settings();
}

}  // namespace mctl
