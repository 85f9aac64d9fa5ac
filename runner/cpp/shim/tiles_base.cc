// For every CPU of the architecture.
#define MCTL_FLOATS 4
#define MCTL_DOUBLES 2
#ifdef __aarch64__
#define MCTL_ROWS 12
#else
#define MCTL_ROWS 6
#endif
#define MCTL_KERNELS kBaseKernels
#include "tiles_of.h"
