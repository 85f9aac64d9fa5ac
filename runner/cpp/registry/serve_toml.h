// `serve.toml`, which may lie beside the versions of a model in a folder that is served: its settings (settings.h), one
// a line.
//
//   # Half of the machine, and only while somebody asks for it.
//   threads = 2
//   instances = {min = 1, max = 2}
//   allowed_batch_sizes = [1, 8, 32]
//   load = "on_demand"
//
// It is TOML 1.0, of which only the kinds of values above, true and false have a meaning here.
#pragma once

#include <string_view>

#include "format/result.h"
#include "registry/settings.h"

namespace mctl {

// Code::usage names the line and what is allowed.
Result<SettingsLayer> parse_serve_toml(std::string_view text);

}  // namespace mctl
