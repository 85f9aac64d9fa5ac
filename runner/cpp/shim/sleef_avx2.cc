// For CPUs with AVX2 and FMA.
#define MCTL_FLOATS 8
#define MCTL_DOUBLES 4
#include "sleef.h"
