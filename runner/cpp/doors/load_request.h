// What a request to load a model asks for, as a change of the state.
#pragma once

#include <boost/json.hpp>
#include <string>
#include <string_view>

#include "format/result.h"

namespace mctl {

struct ManagementSettings {
  std::string model_store;  // the folder that bundles may be loaded from; empty: none
  std::string store;        // the folder for bundles that come in requests; empty: they are refused
};

struct LoadRequest {
  boost::json::value patch;  // change.h
  std::string version;       // that is waited for
};

// Triton's: `parameters` may have `config`, a model configuration as JSON, and `file:VERSION/NAME`, bundles in base64,
// which are kept in the folder of `--store` under their digests. Without a file the model's folder in the model store
// is loaded. Of a configuration what has a setting here is taken; Code::invalid names what has none.
Result<LoadRequest> load_request(const std::string& model, const boost::json::value& body,
                                 const ManagementSettings& settings);

// Finds the bundles that a patch of the state names below the model store, and notes their digests, so that a file that
// has changed is loaded anew. Code::invalid.
Result<boost::json::value> with_bundles_found(boost::json::value patch, const std::string& model_store);

// The file that a request names, below the folder of `--model-store`. Code::invalid.
Result<std::string> path_in_store(const std::string& model_store, std::string_view path);

}  // namespace mctl
