// For CPUs that also have AVX-512's instructions for bfloat16.
#define MCTL_FLOATS 16
#define MCTL_DOUBLES 8
#define MCTL_ROWS 12
#define MCTL_PAIRS kAvx512Pairs
#include "tiles_of.h"
