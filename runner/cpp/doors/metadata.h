// What the server says about itself and its models.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "format/manifest.h"

namespace mctl {

std::string server_metadata();  // GET /v2
// One version of a model, as it is served.
struct Listed {
  std::string_view name, version;
  const Manifest& manifest;
  std::int64_t max_request_rows;           // more than a batch's: they are split
  std::vector<std::string> handler_paths;  // as the front page shows them, `POST /predictions/M`; none: no handler
};

// GET /v2/models/M: of one version, with the names of all.
std::string model_metadata(const Listed& model, std::span<const std::string> versions);
// GET /: the paths and an example for each model, for a person or (json) for a program. `token`: requests have to carry
// one.
std::string front_page(std::span<const Listed> models, const std::string& url, bool token, bool json);

}  // namespace mctl
