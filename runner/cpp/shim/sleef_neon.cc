// For CPUs with NEON.
#define MCTL_FLOATS 4
#define MCTL_DOUBLES 2
#include "sleef.h"
