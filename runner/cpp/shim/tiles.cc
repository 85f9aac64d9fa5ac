#include "tiles.h"

#include "failure.h"

namespace mctl::shim {

extern const Kernels kBaseKernels;

#ifdef __x86_64__
extern const Kernels kAvx2Kernels, kAvx512Kernels;
extern const Tiles<float, Pair> kAvx512Pairs;
#endif

namespace {

// Those of this CPU for vectors of at most so many factors: 32 are bfloat16 numbers, fewer are floats.
const Kernels* widest([[maybe_unused]] int factors) {
#ifdef __x86_64__
  if (factors >= 32 && __builtin_cpu_supports("avx512bf16")) {
    static const Kernels both = [] {
      Kernels kernels = kAvx512Kernels;
      kernels.pairs = kAvx512Pairs;
      return kernels;
    }();
    return &both;
  }
  if (factors >= 16 && __builtin_cpu_supports("avx512f")) return &kAvx512Kernels;
  if (factors >= 8 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return &kAvx2Kernels;
#endif
  return &kBaseKernels;
}

const Kernels* chosen = widest(32);

}  // namespace

const Kernels& kernels() { return *chosen; }

// Takes kernels for narrower vectors than there are. For tests.
MCTL_EXPORT void mctl_shim_limit_vectors(std::int32_t factors) { chosen = widest(factors); }

}  // namespace mctl::shim
