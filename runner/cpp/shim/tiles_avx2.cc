// For CPUs with AVX2 and FMA.
#define MCTL_FLOATS 8
#define MCTL_DOUBLES 4
#define MCTL_ROWS 6
#define MCTL_KERNELS kAvx2Kernels
#include "tiles_of.h"
