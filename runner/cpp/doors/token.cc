#include "doors/token.h"

#include <sys/stat.h>

#include <algorithm>
#include <boost/beast/core/string.hpp>
#include <fstream>

namespace mctl {
namespace {

constexpr std::size_t kLongest = 4096;

Error usage(const std::string& path, std::string_view what) {
  return {Code::usage, "`--token-file`: `" + path + "` " + std::string(what)};
}

bool allowed(char c) { return c > ' ' && c < 0x7f; }

}  // namespace

Result<Token> read_token(const std::string& path) {
  struct stat found{};
  std::ifstream file(path);
  Token token;
  if (!file || ::stat(path.c_str(), &found) != 0) return usage(path, "cannot be read");
  std::getline(file, token.text);
  while (token.text.ends_with('\r') || token.text.ends_with(' ')) token.text.pop_back();
  if (token.text.empty()) return usage(path, "has no token in its first line");
  if (token.text.size() > kLongest || !std::all_of(token.text.begin(), token.text.end(), allowed)) {
    return usage(path, "has a first line that is no token: printable ASCII without spaces, 4096 characters at most");
  }
  token.exposed = (found.st_mode & S_IROTH) != 0;
  return token;
}

bool bears(std::string_view field, std::string_view token) {
  constexpr std::string_view scheme = "Bearer ";
  if (!boost::beast::iequals(field.substr(0, scheme.size()), scheme)) return false;
  field.remove_prefix(scheme.size());
  while (field.starts_with(' ')) field.remove_prefix(1);
  volatile unsigned differs = field.size() != token.size();
  for (std::size_t i = 0; i < field.size(); ++i) {
    differs = differs | static_cast<unsigned char>(field[i] ^ token[i % token.size()]);
  }
  return differs == 0;
}

}  // namespace mctl
