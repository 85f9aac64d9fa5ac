// Targets of requests: their parts, and the answers to those that are none.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "doors/http.h"

namespace mctl {

std::string decoded(std::string_view text);  // %2F is a slash
// The segments of a path, decoded; a slash at the end makes no difference.
std::vector<std::string> segments_of(std::string_view target);

Answer no_such_path();
Answer wrong_verb(std::string_view allowed);  // 405, with those that the path takes

}  // namespace mctl
