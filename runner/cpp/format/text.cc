#include "format/text.h"

namespace mctl {
namespace {

constexpr std::size_t kMostShown = 900;  // bytes of a text

// C0, DEL, and C1, of which one is a terminal's CSI.
bool is_control(char32_t c) { return c < 0x20 || (0x7f <= c && c < 0xa0); }

bool is_safe(char32_t c) {
  const bool turns = (0x202a <= c && c <= 0x202e) || (0x2066 <= c && c <= 0x2069);
  return !is_control(c) && !turns;
}

void append_hex(std::string& out, std::string_view prefix, char32_t value, int digits) {
  out += prefix;
  for (int digit = digits - 1; digit >= 0; --digit) out += "0123456789abcdef"[value >> (4 * digit) & 15];
}

}  // namespace

std::optional<CodePoint> first_code_point(std::string_view text) {
  const auto byte = [&](std::size_t at) { return static_cast<unsigned char>(text[at]); };
  if (text.empty()) return std::nullopt;
  const unsigned char lead = byte(0);
  if (lead < 0x80) return CodePoint{lead, 1};
  const std::size_t size = lead < 0xc2 ? 0 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : lead < 0xf5 ? 4 : 0;
  if (size == 0 || size > text.size()) return std::nullopt;
  char32_t value = lead & (0x7f >> size);
  for (std::size_t at = 1; at < size; ++at) {
    if ((byte(at) & 0xc0) != 0x80) return std::nullopt;
    value = value << 6 | (byte(at) & 0x3f);
  }
  constexpr char32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
  const bool surrogate = 0xd800 <= value && value < 0xe000;
  if (value < least[size] || value > 0x10ffff || surrogate) return std::nullopt;
  return CodePoint{value, size};
}

bool is_utf8(std::string_view text) {
  while (const auto first = first_code_point(text)) text.remove_prefix(first->size);
  return text.empty();
}

std::string printable(std::string_view text) {
  std::string shown;
  while (!text.empty()) {
    if (shown.size() > kMostShown) return shown + "…";
    const auto first = first_code_point(text);
    const std::size_t size = first ? first->size : 1;
    if (!first)
      append_hex(shown, "\\x", static_cast<unsigned char>(text.front()), 2);
    else if (is_safe(first->value))
      shown += text.substr(0, size);
    else if (first->value < 0x100)
      append_hex(shown, "\\x", first->value, 2);
    else
      append_hex(shown, "\\u", first->value, 4);
    text.remove_prefix(size);
  }
  return shown;
}

void append_json_string(std::string& out, std::string_view text) {
  out += '"';
  while (!text.empty()) {
    const auto first = first_code_point(text);
    const std::size_t size = first ? first->size : 1;
    if (!first) {
      out += "\\ufffd";
    } else if (first->value == '"' || first->value == '\\') {
      (out += '\\') += text.front();
    } else if (is_control(first->value)) {
      append_hex(out, "\\u", first->value, 4);
    } else {
      out += text.substr(0, size);
    }
    text.remove_prefix(size);
  }
  out += '"';
}

Error damaged(std::string_view text) { return {Code::damaged, printable(text)}; }

}  // namespace mctl
