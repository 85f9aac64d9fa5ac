// The front process: reads the bundle, listens, starts workers, and drains when it is told to end.
#pragma once

#include <functional>
#include <string>

#include "format/result.h"
#include "options.h"

namespace mctl {

// Runs until a signal ends it; the value is the exit code. `say` prints a line for the operator.
Result<int> serve(const ServeOptions& options, const std::function<void(const std::string&)>& say);

}  // namespace mctl
