// The kernels of tiles.h for vectors of MCTL_FLOATS floats and MCTL_DOUBLES doubles, with tiles of MCTL_ROWS rows, as
// MCTL_KERNELS. Each file that includes this is compiled for the CPUs that have such vectors, so nothing here may be
// shared with others: no inline function of a header is called.
#pragma once

#include <string.h>

#include "exponential.h"
#include "tiles.h"

namespace {

using std::int64_t;

typedef std::uint64_t Wholes __attribute__((vector_size(8 * MCTL_DOUBLES)));

template <class Vector, class T, int kRows>
void tile(int64_t k, const T* a, int64_t a_stride, const T* b, int64_t b_stride, T* out, int64_t out_stride) {
  constexpr int kLanes = sizeof(Vector) / sizeof(T);
  Vector sums[kRows][2] = {};
  for (int64_t l = 0; l < k; ++l, b += b_stride) {
    Vector left, right;
    memcpy(&left, b, sizeof left);
    memcpy(&right, b + kLanes, sizeof right);
#pragma GCC unroll 12
    for (int i = 0; i < kRows; ++i) {
      const Vector x = a[i * a_stride + l] - Vector{};
      sums[i][0] += x * left;
      sums[i][1] += x * right;
    }
  }
#pragma GCC unroll 12
  for (int i = 0; i < kRows; ++i) memcpy(out + i * out_stride, sums[i], sizeof sums[i]);
}

template <class Vector, class T, int kRow>
constexpr mctl::shim::Tile<T> tile_of() {
  if constexpr (kRow <= MCTL_ROWS)
    return tile<Vector, T, kRow>;
  else
    return nullptr;
}

template <class Vector, class T>
constexpr mctl::shim::Tiles<T> tiles() {
  return {MCTL_ROWS,
          2 * sizeof(Vector) / sizeof(T),
          {tile_of<Vector, T, 1>(), tile_of<Vector, T, 2>(), tile_of<Vector, T, 3>(), tile_of<Vector, T, 4>(),
           tile_of<Vector, T, 5>(), tile_of<Vector, T, 6>(), tile_of<Vector, T, 7>(), tile_of<Vector, T, 8>(),
           tile_of<Vector, T, 9>(), tile_of<Vector, T, 10>(), tile_of<Vector, T, 11>(), tile_of<Vector, T, 12>()}};
}

float exponentials(float* x, int64_t count, float scale, float base) {
  Floats sums = {};
  for (int64_t i = 0; i < count; i += MCTL_FLOATS) {
    const int64_t lanes = count - i < MCTL_FLOATS ? count - i : MCTL_FLOATS;
    Floats y = Floats{} - __builtin_inff();  // e^y is 0 where there is nothing
    memcpy(&y, x + i, static_cast<unsigned long>(lanes) * sizeof(float));
    y = exp_of(y * scale - base);
    memcpy(x + i, &y, static_cast<unsigned long>(lanes) * sizeof(float));
    for (int64_t lane = lanes; lane < MCTL_FLOATS; ++lane) y[lane] = 0;
    sums += y;
  }
  float sum = 0;
  for (int lane = 0; lane < MCTL_FLOATS; ++lane) sum += sums[lane];
  return sum;
}

}  // namespace

namespace mctl::shim {

extern const Kernels MCTL_KERNELS;
const Kernels MCTL_KERNELS = {tiles<Floats, float>(), tiles<Doubles, double>(), tiles<Wholes, std::uint64_t>(),
                              exponentials};

}  // namespace mctl::shim
