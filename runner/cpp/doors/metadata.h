// What the server says about itself and its model: bodies that don't change while it runs.
#pragma once

#include <string>

#include "format/manifest.h"

namespace mctl {

std::string server_metadata();                         // GET /v2
std::string model_metadata(const Manifest& manifest);  // GET /v2/models/M
// GET /: the paths and an example, for a person or (json) for a program. `token`: requests have to carry one.
std::string front_page(const Manifest& manifest, const std::string& url, bool token, bool json);

}  // namespace mctl
