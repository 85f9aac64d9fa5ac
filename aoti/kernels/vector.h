// Vectors of floats as wide as the target's registers, by the vector extensions of g++ and clang.
#pragma once

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

}  // namespace mctl
