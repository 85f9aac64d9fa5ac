#include "format/layout.h"

#include <algorithm>

namespace mctl {

std::string path_fault(std::string_view path) {
  const auto is_control = [](char c) { return static_cast<unsigned char>(c) < ' ' || c == 0x7f; };
  if (path.size() > kMaxName) return "it is longer than " + std::to_string(kMaxName) + " bytes";
  if (std::ranges::any_of(path, is_control)) return "it holds a control character";
  if (path.find('\\') != std::string_view::npos) return "it holds a backslash";
  if (path.starts_with('/')) return "it is absolute";
  for (std::size_t at = 0; at <= path.size();) {
    const std::size_t end = std::min(path.find('/', at), path.size());
    const auto part = path.substr(at, end - at);
    if (part.empty() || part == "." || part == "..") return "it has an empty part, `.` or `..`";
    at = end + 1;
  }
  return {};
}

}  // namespace mctl
