// For CPUs with AVX-512.
#define MCTL_FLOATS 16
#define MCTL_DOUBLES 8
#include "sleef.h"
