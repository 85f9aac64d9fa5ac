// Text that comes from a file: is it UTF-8, and how is it shown to a person?
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

// Code::damaged with a text that is printable.
Error damaged(std::string_view text);

}  // namespace mctl
