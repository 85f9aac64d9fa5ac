// Compiled code that is loaded from memory.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "format/result.h"

namespace mctl {

// Stays loaded for the life of the process: threads that OpenMP keeps may still be inside it.
struct LoadedCode {
  void* library = nullptr;  // of dlopen()
  int fd = -1;              // of the file that it was loaded from
  std::string folder;       // where that file was; empty: in memory
};

// `name` is what tools show of the file.
Result<LoadedCode> load_code(const char* name, std::span<const std::byte> bytes);

}  // namespace mctl
