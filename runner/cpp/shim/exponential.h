// e^x for vectors of MCTL_FLOATS floats. Each file that includes this is compiled for the CPUs that have such vectors.
#pragma once

namespace {

typedef float Floats __attribute__((vector_size(4 * MCTL_FLOATS)));
typedef int Ints __attribute__((vector_size(4 * MCTL_FLOATS)));
typedef double Doubles __attribute__((vector_size(8 * MCTL_DOUBLES)));

// e^x: x = n ln 2 + r with |r| <= ln(2)/2, e^r by its series. ln 2 comes in two parts, so that n times the first is
// exact, and 2^n in two factors, so that subnormal results are right. Within 1 ulp.
inline Floats exp_of(Floats x) {
  const Floats zero = {};
  x = x > 89.0f ? zero + 89.0f : x;  // NaN stays
  x = x < -104.0f ? zero - 104.0f : x;
  const Floats shift = zero + 0x1.8p23f;  // adding it rounds to an integer
  const Floats n = (x * 0x1.715476p0f + shift) - shift;
  const Floats near = x - n * 0x1.62e4p-1f, r = near - n * 0x1.7f7d1cp-20f;
  const Floats lost = (near - r) - n * 0x1.7f7d1cp-20f;  // by rounding r
  Floats tail = zero + 1.0f / 5040;
  tail = tail * r + 1.0f / 720;
  tail = tail * r + 1.0f / 120;
  tail = tail * r + 1.0f / 24;
  tail = tail * r + 1.0f / 6;
  tail = tail * r + 0.5f;
  const Floats value = (tail * r * r + lost + r) + 1.0f;
  const Ints power = __builtin_convertvector(n, Ints), half = power >> 1;
  return value * (Floats)((half + 127) << 23) * (Floats)((power - half + 127) << 23);
}

}  // namespace
