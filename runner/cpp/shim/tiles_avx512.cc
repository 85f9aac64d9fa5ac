// For CPUs with AVX-512.
#define MCTL_FLOATS 16
#define MCTL_DOUBLES 8
#define MCTL_ROWS 12
#define MCTL_KERNELS kAvx512Kernels
#include "tiles_of.h"
