#include "doors/path.h"

#include <algorithm>

namespace mctl {
namespace {

int hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if ((c | 32) >= 'a' && (c | 32) <= 'f') return (c | 32) - 'a' + 10;
  return -1;
}

}  // namespace

std::string decoded(std::string_view text) {
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const bool escape = text[i] == '%' && i + 2 < text.size() && hex_digit(text[i + 1]) >= 0;
    if (escape && hex_digit(text[i + 2]) >= 0) {
      out += static_cast<char>(hex_digit(text[i + 1]) * 16 + hex_digit(text[i + 2]));
      i += 2;
    } else {
      out += text[i];
    }
  }
  return out;
}

std::vector<std::string> segments_of(std::string_view target) {
  target = target.substr(0, target.find_first_of("?#"));
  std::vector<std::string> segments;
  while (!target.empty()) {
    target.remove_prefix(target.front() == '/' ? 1 : 0);
    const std::size_t end = std::min(target.find('/'), target.size());
    if (end > 0 || end < target.size()) segments.push_back(decoded(target.substr(0, end)));
    target.remove_prefix(end);
  }
  return segments;
}

Answer no_such_path() { return refusal({Code::not_found, "no such path: GET / lists them"}); }

Answer wrong_verb(std::string_view allowed) {
  Answer answer = refusal({Code::method, "this path takes " + std::string(allowed)});
  answer.fields = "Allow: " + std::string(allowed) + "\r\n";
  return answer;
}

}  // namespace mctl
