#include "tiles.h"

#include "failure.h"

namespace mctl::shim {

extern const Kernels kBaseKernels;

#ifdef __x86_64__
extern const Kernels kAvx2Kernels, kAvx512Kernels;
#endif

namespace {

// Those for vectors of at most so many floats that this CPU has.
const Kernels* widest([[maybe_unused]] int floats) {
#ifdef __x86_64__
  if (floats >= 16 && __builtin_cpu_supports("avx512f")) return &kAvx512Kernels;
  if (floats >= 8 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return &kAvx2Kernels;
#endif
  return &kBaseKernels;
}

const Kernels* chosen = widest(16);

}  // namespace

const Kernels& kernels() { return *chosen; }

// Takes kernels for narrower vectors than there are. For tests.
MCTL_EXPORT void mctl_shim_limit_vectors(std::int32_t floats) { chosen = widest(floats); }

}  // namespace mctl::shim
