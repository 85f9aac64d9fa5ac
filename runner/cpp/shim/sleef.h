// The functions of SLEEF's vector interface (https://sleef.org/2-references/libm/) that compiled code calls, for
// vectors of MCTL_FLOATS floats and MCTL_DOUBLES doubles. Each file that includes this is compiled for the CPUs that
// have such vectors, so nothing here may be shared with others: no inline function of a header is called.
//
// In float32 a value is what libm gives in float64, rounded: within 0.51 ulp. In float64 it is what libm gives. What
// models call most is computed by all lanes at once.
#pragma once

#include <math.h>

#include "exponential.h"
#include "failure.h"

namespace {

// tanh x = 1 - 2 / (e^2x + 1); near zero by the polynomial of Cephes (https://www.netlib.org/cephes/, tanhf). Within
// 1.5 ulp.
inline Floats tanh_of(Floats x) {
  const Floats zero = {};
  const Ints sign = (Ints)x & (int)0x80000000;
  const Floats size = (Floats)((Ints)x ^ sign), square = x * x;
  Floats near = zero - 5.70498872745e-3f;
  near = near * square + 2.06390887954e-2f;
  near = near * square - 5.37397155531e-2f;
  near = near * square + 1.33314422036e-1f;
  near = near * square - 3.33332819422e-1f;
  near = near * square * size + size;
  const Floats far = 1.0f - 2.0f / (exp_of(2.0f * size) + 1.0f);
  const Floats value = size < 0.625f ? near : far;
  return (Floats)((Ints)value | sign);
}

}  // namespace

#define MCTL_JOIN(name, lanes, kind) Sleef_##name##lanes##kind
#define MCTL_NAME(name, lanes, kind) MCTL_JOIN(name, lanes, kind)

#define MCTL_UNARY(name, accuracy, function, letter, Vector, lanes)       \
  MCTL_EXPORT Vector MCTL_NAME(name##letter, lanes, accuracy)(Vector x) { \
    for (int i = 0; i < lanes; ++i) x[i] = function((double)x[i]);        \
    return x;                                                             \
  }
#define MCTL_BINARY(name, accuracy, function, letter, Vector, lanes)                \
  MCTL_EXPORT Vector MCTL_NAME(name##letter, lanes, accuracy)(Vector x, Vector y) { \
    for (int i = 0; i < lanes; ++i) x[i] = function(x[i], y[i]);                    \
    return x;                                                                       \
  }
#define MCTL_BOTH(kind, name, accuracy, function) \
  kind(name, accuracy, function, f, Floats, MCTL_FLOATS) kind(name, accuracy, function, d, Doubles, MCTL_DOUBLES)

MCTL_EXPORT Floats MCTL_NAME(expf, MCTL_FLOATS, _u10)(Floats x) { return exp_of(x); }
MCTL_EXPORT Floats MCTL_NAME(tanhf, MCTL_FLOATS, _u10)(Floats x) { return tanh_of(x); }
MCTL_UNARY(exp, _u10, exp, d, Doubles, MCTL_DOUBLES)
MCTL_UNARY(tanh, _u10, tanh, d, Doubles, MCTL_DOUBLES)

MCTL_BOTH(MCTL_UNARY, acos, _u10, acos)
MCTL_BOTH(MCTL_UNARY, acosh, _u10, acosh)
MCTL_BOTH(MCTL_UNARY, asin, _u10, asin)
MCTL_BOTH(MCTL_UNARY, asinh, _u10, asinh)
MCTL_BOTH(MCTL_UNARY, atan, _u10, atan)
MCTL_BOTH(MCTL_UNARY, atanh, _u10, atanh)
MCTL_BOTH(MCTL_UNARY, cos, _u10, cos)
MCTL_BOTH(MCTL_UNARY, cos, _u35, cos)
MCTL_BOTH(MCTL_UNARY, cosh, _u10, cosh)
MCTL_BOTH(MCTL_UNARY, erf, _u10, erf)
MCTL_BOTH(MCTL_UNARY, erfc, _u15, erfc)
MCTL_BOTH(MCTL_UNARY, exp2, _u10, exp2)
MCTL_BOTH(MCTL_UNARY, expm1, _u10, expm1)
MCTL_BOTH(MCTL_UNARY, lgamma, _u10, lgamma)
MCTL_BOTH(MCTL_UNARY, log, _u10, log)
MCTL_BOTH(MCTL_UNARY, log10, _u10, log10)
MCTL_BOTH(MCTL_UNARY, log1p, _u10, log1p)
MCTL_BOTH(MCTL_UNARY, log2, _u10, log2)
MCTL_BOTH(MCTL_UNARY, sin, _u10, sin)
MCTL_BOTH(MCTL_UNARY, sin, _u35, sin)
MCTL_BOTH(MCTL_UNARY, sinh, _u10, sinh)
MCTL_BOTH(MCTL_UNARY, tan, _u10, tan)

MCTL_BOTH(MCTL_BINARY, atan2, _u10, atan2)
MCTL_BOTH(MCTL_BINARY, hypot, _u05, hypot)
MCTL_BOTH(MCTL_BINARY, pow, _u10, pow)
MCTL_BOTH(MCTL_BINARY, copysign, , copysign)
MCTL_BOTH(MCTL_BINARY, fmod, , fmod)
MCTL_BINARY(nextafter, , nextafterf, f, Floats, MCTL_FLOATS)
MCTL_BINARY(nextafter, , nextafter, d, Doubles, MCTL_DOUBLES)
