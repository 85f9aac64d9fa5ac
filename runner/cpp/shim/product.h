// Products of matrices of any strides, in the tiles of tiles.h.
#pragma once

#include <cmath>

#include "operators.h"
#include "tiles.h"

namespace mctl::shim {

// What elements are multiplied and summed as.
template <class E>
using Sum = std::conditional_t<std::is_integral_v<E>, std::uint64_t, std::conditional_t<is_narrow<E>, float, E>>;

template <class T, class Element = T>
const Tiles<T, Element>& tiles_for() {
  if constexpr (!std::is_same_v<T, Element>)
    return kernels().pairs;
  else if constexpr (std::is_same_v<T, float>)
    return kernels().floats;
  else if constexpr (std::is_same_v<T, double>)
    return kernels().doubles;
  else
    return kernels().integers;
}

// x = e^(x * scale - base) in place; returns the sum.
inline float exponentials(float* x, std::int64_t count, float scale, float base) {
  return kernels().exponentials(x, count, scale, base);
}

inline double exponentials(double* x, std::int64_t count, double scale, double base) {
  double sum = 0;
  for (std::int64_t i = 0; i < count; ++i) sum += x[i] = std::exp(x[i] * scale - base);
  return sum;
}

constexpr int kMostColumns = 32;  // of a tile: floats of two AVX-512 registers

// The largest x * scale; NaN if there is one.
inline float largest(const float* x, std::int64_t count, float scale) { return kernels().largest(x, count, scale); }

inline double largest(const double* x, std::int64_t count, double scale) {
  double most = -INFINITY;
  for (std::int64_t i = 0; i < count; ++i) most = x[i] * scale > most || std::isnan(x[i]) ? x[i] * scale : most;
  return most;
}

// Calls `f` with a null pointer to the type of the dtype's elements, where torch multiplies such. False: it does not.
template <class F>
bool with_factor_type(std::int32_t dtype, F&& f) {
  return with_type(dtype,
                   [&]<class E>(E* type) {
                     if constexpr (!std::is_same_v<E, bool> && !std::is_same_v<E, std::uint16_t> &&
                                   !std::is_same_v<E, std::uint32_t> && !std::is_same_v<E, std::uint64_t>)
                       f(type);
                   }) &&
         dtype != 11 && dtype < 27;
}

// The same for floating-point numbers only.
template <class F>
bool with_float_type(std::int32_t dtype, F&& f) {
  const bool known = dtype == 5 || dtype == 6 || dtype == 7 || dtype == 15;
  return known && with_factor_type(dtype, [&]<class E>(E* type) {
           if constexpr (!std::is_integral_v<E>) f(type);
         });
}

// A matrix that lies anywhere; strides in elements.
template <class E>
struct Strided {
  E* data;
  std::int64_t row, column;

  E* operator()(std::int64_t i, std::int64_t j) const { return data + i * row + j * column; }
};

// Rows of `count` elements as sums are made of, one after the other.
template <class T, class E>
void pack_row(const E* from, std::int64_t step, std::int64_t count, T* to) {
  if (step == 1)
    for (std::int64_t i = 0; i < count; ++i) to[i] = cast<T>(from[i]);
  else
    for (std::int64_t i = 0; i < count; ++i) to[i] = cast<T>(from[i * step]);
}

constexpr std::int64_t kAhead = 12;  // rows, of long strides, that are asked for before they are read

// `columns` columns as a panel: k rows of `width` elements, of which those beyond are 0.
template <class T, class E>
void pack_panel(Strided<const E> from, std::int64_t k, std::int64_t columns, std::int64_t width, T* to) {
  if (from.column == 1 || columns == 1) {
    for (std::int64_t l = 0; l < k; ++l, to += width) {
      if (l + kAhead < k) __builtin_prefetch(from(l + kAhead, 0));
      pack_row(from(l, 0), 1, columns, to);
      std::fill(to + columns, to + width, T(0));
    }
    return;
  }
  if constexpr (std::is_same_v<E, float> && std::is_same_v<T, float>) {
    if (from.row == 1 && columns == width) {
      for (std::int64_t j = 0; j < width; j += width / 2) kernels().turn(from(0, j), from.column, k, to + j, width);
      return;
    }
  }
  constexpr std::int64_t kBlock = 16;  // what is read along the rows and written across them stays in the cache
  for (std::int64_t l = 0; l < k; l += kBlock, to += kBlock * width) {
    const std::int64_t rows = std::min(kBlock, k - l);
    for (std::int64_t j = 0; j < columns; ++j)
      for (std::int64_t i = 0; i < rows; ++i) to[i * width + j] = cast<T>(*from(l + i, j));
    for (std::int64_t i = 0; i < rows; ++i) std::fill(to + i * width + columns, to + (i + 1) * width, T(0));
  }
}

// The panels of `columns` columns, one after the other.
template <class T, class E>
void pack_panels(Strided<const E> from, std::int64_t k, std::int64_t columns, std::int64_t width, T* to) {
  for (std::int64_t j = 0; j < columns; j += width, to += k * width)
    pack_panel(Strided<const E>{from(0, j), from.row, from.column}, k, std::min(width, columns - j), width, to);
}

// Rows times a panel, in tiles of about equal numbers of rows.
template <class T>
void multiply_panel(const Tiles<T>& tiles, std::int64_t rows, std::int64_t k, const T* a, std::int64_t a_stride,
                    const T* panel, std::int64_t panel_stride, T* out, std::int64_t out_stride) {
  const std::int64_t blocks = (rows + tiles.rows - 1) / tiles.rows;
  for (std::int64_t block = 0, row = 0; block < blocks; ++block) {
    const std::int64_t next = rows * (block + 1) / blocks;
    tiles(next - row)(k, a + row * a_stride, a_stride, panel, panel_stride, out + row * out_stride, out_stride);
    row = next;
  }
}

// alpha * a b + beta * self, a number of times with strides from each to the next. Without beta `self` is not read.
template <class E>
struct Product {
  std::int64_t count, m, n, k;
  Strided<const E> a, b, self;
  Strided<E> out;
  std::int64_t next_a, next_b, next_self, next_out;
  Sum<E> alpha, beta;

  AOTITorchError run() const;
};

}  // namespace mctl::shim
