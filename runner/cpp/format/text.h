// Text that comes from outside: is it UTF-8, and how is it shown to a person, or in JSON?
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include "format/result.h"

namespace mctl {

struct CodePoint {
  char32_t value;
  std::size_t size;  // bytes
};

// What `text` starts with; nullopt: nothing, or no valid UTF-8.
std::optional<CodePoint> first_code_point(std::string_view text);
bool is_utf8(std::string_view text);

// On one line and at most some hundred bytes long; what moves a terminal's cursor or turns its writing around is shown
// by its number.
std::string printable(std::string_view text);

// Appends text as a JSON string, quotes included; controls are escaped, what is no UTF-8 becomes U+FFFD.
void append_json_string(std::string& out, std::string_view text);

// Code::damaged with a text that is printable.
Error damaged(std::string_view text);

}  // namespace mctl
