// What a fuzz target says when a property does not hold.
#pragma once

#include <cstdio>
#include <cstdlib>

namespace mctl {

// libFuzzer keeps the input that ends the process.
inline void require(bool holds, const char* property) {
  if (holds) return;
  std::fprintf(stderr, "does not hold: %s\n", property);
  std::abort();
}

}  // namespace mctl
