// The secret that clients have to know (RFC 6750), if the server has one.
#pragma once

#include <string>
#include <string_view>

#include "format/result.h"

namespace mctl {

struct Token {
  std::string text;
  bool exposed = false;  // everybody on this machine can read its file
};

// The first line of a file. Code::usage if there is no token in it.
Result<Token> read_token(const std::string& path);

// Is `field`, the value of an Authorization field, the scheme Bearer with this token? Takes as long for a wrong token
// as for the right one.
bool bears(std::string_view field, std::string_view token);

}  // namespace mctl
