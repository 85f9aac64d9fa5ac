// Activations of whole vectors, to about the precision of float32; NaN and infinity give what torch gives.
#pragma once

#include "vector.h"

namespace mctl {

// The numbers are those of aoti/ops.py.
enum class Activation : std::int64_t { none, relu, gelu, gelu_tanh, silu, tanh, sigmoid };

// e^x. x = n ln 2 + r with |r| <= ln 2 / 2; e^r by the polynomial of Cephes' expf (Moshier, Methods and Programs for
// Mathematical Functions, 1989): relative error below 2e-7. Overflows to infinity, underflows to 0. `kNoLarge`: no x is
// above 0, which saves a third of the work. The shim's (runner/cpp/shim/exponential.h) stands for libtorch's, and so is
// within 1 ulp and has subnormal results; this one leaves both out, which takes fewer steps.
template <bool kNoLarge = false>
inline Floats exp(Floats x) {
  const Floats above = at_least(x, -87.33654f);
  const Floats within = kNoLarge ? above : at_most(above, 88.72283f);
  const Floats magic = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, in the low bits
  const Floats shifted = within * 1.44269504f + magic;
  const Floats n = shifted - magic;
  const Floats r = (within - n * 0.693359375f) + n * 2.12194440e-4f;
  Floats p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const Floats e = p * r * r + r + 1.0f;
  const Ints whole = (Ints)shifted - 0x4B400000;
  if constexpr (kNoLarge) return x < all(-87.33654f) ? Floats{} : e * (Floats)((whole + 127) << 23);
  // 2^n in two factors: n may be 128, for which there is no float
  const Ints half = whole >> 1;
  const Ints low = (half + 127) << 23, high = (whole - half + 127) << 23;
  const Floats y = e * (Floats)low * (Floats)high;
  const Floats large = x > all(88.72283f) ? all(__builtin_inff()) : y;
  return x < all(-87.33654f) ? Floats{} : large;
}

inline Floats sigmoid(Floats x) { return 1.0f / (1.0f + exp(-x)); }

// By e^2x; near 0, where that cancels, by the polynomial of Cephes' tanhf.
inline Floats tanh(Floats x) {
  const Floats magnitude = x < Floats{} ? -x : x;
  const Floats far = 1.0f - 2.0f / (exp(2.0f * magnitude) + 1.0f);
  const Floats z = x * x;
  Floats p = all(-5.70498872745e-3f);
  p = p * z + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  const Floats near = p * z * x + x;
  const Floats signed_far = x < Floats{} ? -far : far;
  return magnitude < all(0.625f) ? near : signed_far;
}

// The complementary error function: Chebyshev fit with a relative error below 1.2e-7 everywhere (Press et al.,
// Numerical Recipes, 2nd edition, section 6.2).
inline Floats erfc(Floats x) {
  const Floats z = x < Floats{} ? -x : x;
  const Floats t = 1.0f / (1.0f + 0.5f * z);
  Floats p = all(0.17087277f);
  p = p * t - 0.82215223f;
  p = p * t + 1.48851587f;
  p = p * t - 1.13520398f;
  p = p * t + 0.27886807f;
  p = p * t - 0.18628806f;
  p = p * t + 0.09678418f;
  p = p * t + 0.37409196f;
  p = p * t + 1.00002368f;
  p = p * t - 1.26551223f;
  const Floats upper = t * exp<true>(p - z * z);
  return x < Floats{} ? 2.0f - upper : upper;
}

inline Floats gelu(Floats x) { return x * 0.5f * erfc(x * -0.70710678f); }

// 0.5 x (1 + tanh(u)) is x sigmoid(2 u).
inline Floats gelu_tanh(Floats x) { return x * sigmoid(1.59576912f * (x + 0.044715f * x * x * x)); }

inline Floats activated(Floats x, Activation activation) {
  switch (activation) {
    case Activation::none:
      return x;
    case Activation::relu:
      return x < Floats{} ? Floats{} : x;
    case Activation::gelu:
      return gelu(x);
    case Activation::gelu_tanh:
      return gelu_tanh(x);
    case Activation::silu:
      return x / (1.0f + exp(-x));
    case Activation::tanh:
      return tanh(x);
    case Activation::sigmoid:
      return sigmoid(x);
  }
  return x;
}

}  // namespace mctl
