// Compiled code that is loaded from memory.
#pragma once

#include <cstddef>
#include <span>

#include "format/result.h"
#include "model/unnamed_file.h"

namespace mctl {

// A copy of code that can be loaded; none of it has run. `name` is what tools show of the file.
Result<UnnamedFile> file_of_code(const char* name, std::span<const std::byte> bytes);

// Runs the code's constructors. What dlopen() gives stays loaded for the life of the process: threads that OpenMP keeps
// may still be inside it.
Result<void*> load_code(const UnnamedFile& file);

}  // namespace mctl
