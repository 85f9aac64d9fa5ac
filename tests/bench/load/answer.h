// An HTTP answer, and whether its numbers are right.
#pragma once

#include <strings.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>

#include "plan.h"

namespace load {

constexpr std::size_t kMostHead = 64 << 10, kMostBody = 64 << 20;

struct Head {
  int status = 0;
  std::size_t size = 0, body = 0, json = 0;  // bytes of the head, of the body, and of the JSON before binary outputs
  bool close = false;
};

inline bool same_word(std::string_view a, std::string_view b) {
  return a.size() == b.size() && strncasecmp(a.data(), b.data(), a.size()) == 0;
}

// False while the head is not complete; throws what is wrong with it.
inline bool parse_head(std::string_view text, Head& head) {
  const std::size_t end = text.find("\r\n\r\n");
  if (end == std::string_view::npos) {
    if (text.size() > kMostHead) throw std::runtime_error("the head is too long");
    return false;
  }
  if (!text.starts_with("HTTP/1.1 ")) throw std::runtime_error("no HTTP/1.1 answer");
  head = {static_cast<int>(number(text.substr(9, 3))), end + 4, kMostBody + 1, 0, false};
  for (std::size_t at = text.find("\r\n") + 2; at < end + 2;) {
    const std::size_t line_end = text.find("\r\n", at), colon = std::min(text.find(':', at), line_end);
    const std::string_view name = text.substr(at, colon - at);
    std::string_view value = text.substr(colon, line_end - colon);
    value.remove_prefix(std::min(value.find_first_not_of(": \t"), value.size()));
    if (same_word(name, "content-length")) head.body = static_cast<std::size_t>(number(value));
    if (same_word(name, "inference-header-content-length")) head.json = static_cast<std::size_t>(number(value));
    if (same_word(name, "connection")) head.close = same_word(value, "close");
    at = line_end + 2;
  }
  if (head.body > kMostBody) throw std::runtime_error("no Content-Length, or one that is too large");
  if (head.json > head.body) throw std::runtime_error("the JSON is longer than the body");
  return true;
}

// Why the outputs are not what they should be; empty if they are. With tolerances, both are float32.
inline std::string fault_of(std::string_view got, std::string_view wanted, double rtol, double atol) {
  if (wanted.empty()) return {};
  if (got.size() != wanted.size()) {
    return std::to_string(got.size()) + " bytes of outputs, not " + std::to_string(wanted.size());
  }
  if (rtol == 0 && atol == 0) return got == wanted ? "" : "other bytes";
  for (std::size_t at = 0; at + 4 <= got.size(); at += 4) {
    float a = 0, b = 0;
    std::memcpy(&a, got.data() + at, 4);
    std::memcpy(&b, wanted.data() + at, 4);
    if (!(std::abs(a - b) <= atol + rtol * std::abs(b))) {
      return "element " + std::to_string(at / 4) + " is " + std::to_string(a) + ", not " + std::to_string(b);
    }
  }
  return {};
}

}  // namespace load
