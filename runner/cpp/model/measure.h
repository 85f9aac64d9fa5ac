// The measure role: calls a bundle's variants as a worker does and says how long each call took. `mctl bench` starts
// it, and parity does for bundles that need no libtorch.
#pragma once

#include <string>

namespace mctl {

struct MeasureOptions {
  std::string bundle;
  std::string libtorch;  // as HostLibrary::load takes it
  int threads = 1;       // OpenMP threads of a variant that doesn't set its own
};

// Answers `{"ready":true}` on stdout, then each line of stdin with one on stdout, until stdin ends:
//   {"tensors": FILE, "dims": {NAME: SIZE}, "variant": NAME, "seconds": S, "calls": N}, with "outputs": FILE
//   and "state": "kept" if wanted
//   {"ns": [NANOSECONDS, …]}, of at most N calls within about S seconds, at least one; or {"error": TEXT}
// The files are safetensors: `tensors` has `input.NAME` for each input; `outputs`, if given, gets `output.NAME` for
// each output of the last call. No name of a variant: the one that a server would choose. State starts anew with each
// line that does not say "kept".
int run_measure(const MeasureOptions& options);

}  // namespace mctl
