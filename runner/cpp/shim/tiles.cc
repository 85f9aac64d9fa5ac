#include "tiles.h"

namespace mctl::shim {

extern const Kernels kBaseKernels;

#ifdef __x86_64__
extern const Kernels kAvx2Kernels, kAvx512Kernels;

const Kernels& kernels() {
  static const Kernels& best = __builtin_cpu_supports("avx512f")                                 ? kAvx512Kernels
                               : __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? kAvx2Kernels
                                                                                                 : kBaseKernels;
  return best;
}
#else
const Kernels& kernels() { return kBaseKernels; }
#endif

}  // namespace mctl::shim
