// Vectors of floats as wide as the target's registers, by the vector extensions of g++ and clang.
#pragma once

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#include <bit>
#include <cstdint>
#include <cstring>

namespace mctl {

#if defined(__AVX512F__)
inline constexpr int kLanes = 16;
inline constexpr int kRegisters = 32;
#elif defined(__AVX__)
inline constexpr int kLanes = 8;
inline constexpr int kRegisters = 16;
#elif defined(__aarch64__)
inline constexpr int kLanes = 4;
inline constexpr int kRegisters = 32;
#else
inline constexpr int kLanes = 4;
inline constexpr int kRegisters = 16;
#endif

using Floats = float __attribute__((vector_size(kLanes * 4)));
using Ints = std::int32_t __attribute__((vector_size(kLanes * 4)));

inline Floats load(const float* at) {
  Floats v;
  std::memcpy(&v, at, sizeof v);
  return v;
}

inline void store(float* at, Floats v) { std::memcpy(at, &v, sizeof v); }

inline Floats all(float x) { return x - Floats{}; }

// Two bfloat16 numbers, the first in the low half: as many of them in a vector as there are floats.
using Pair = std::uint32_t;

inline Ints load(const Pair* at) {
  Ints v;
  std::memcpy(&v, at, sizeof v);
  return v;
}

inline Ints all(Pair x) { return static_cast<std::int32_t>(x) - Ints{}; }

// sum + x * y, lane by lane; of pairs, the two products, summed in float32. The instruction for pairs takes denormals
// for 0, and makes 0 of denormal sums.
inline Floats plus_product(Floats sum, Floats x, Floats y) { return sum + x * y; }

inline Floats plus_product(Floats sum, Ints x, Ints y) {
#ifdef __AVX512BF16__
  return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)y);
#else
  constexpr std::int32_t second = -(1 << 16);
  sum += (Floats)(x & second) * (Floats)(y & second);
  return sum + (Floats)(x << 16) * (Floats)(y << 16);
#endif
}

// To the nearest bfloat16, of two the even one; as torch does it, and the runner's Bfloat16.
inline Pair rounded(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  return x != x ? 0x7FC0 : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

// The first `count` lanes; the others are 0.
inline Floats load(const float* at, int count) {
  if (count == kLanes) return load(at);
  Floats v{};
  std::memcpy(&v, at, static_cast<std::size_t>(count) * sizeof(float));
  return v;
}

inline void store(float* at, Floats v, int count) {
  if (count == kLanes) return store(at, v);
  std::memcpy(at, &v, static_cast<std::size_t>(count) * sizeof(float));
}

// A NaN in `a` is kept.
inline Floats at_least(Floats a, float low) { return a < all(low) ? all(low) : a; }
inline Floats at_most(Floats a, float high) { return a > all(high) ? all(high) : a; }

template <int kCount>
struct Vector {
  typedef float Type __attribute__((vector_size(kCount * 4)));
};

// All lanes as one: halves are joined by `both` until one lane is left.
template <int kCount = kLanes, class Both>
inline float folded(typename Vector<kCount>::Type v, const Both& both) {
  if constexpr (kCount == 1) {
    return v[0];
  } else {
    struct Halves {
      typename Vector<kCount / 2>::Type low, high;
    };
    const auto halves = std::bit_cast<Halves>(v);
    return folded<kCount / 2>(both(halves.low, halves.high), both);
  }
}

}  // namespace mctl
