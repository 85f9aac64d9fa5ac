// The innermost loops of products and of softmax, in one version for each width of vectors (tiles_*.cc).
#pragma once

#include <cstdint>

namespace mctl::shim {

// Two bfloat16 numbers side by side, the first in the low half: an element of a product as a float is.
using Pair = std::uint32_t;

// out[i][j] = the sum over l of a[i][l] * b[l][j], in the order of l, for some rows i and a fixed number of columns j:
// so a row's numbers do not depend on what is computed beside it.
template <class T, class Element = T>
using Tile = void (*)(std::int64_t k, const Element* a, std::int64_t a_stride, const Element* b, std::int64_t b_stride,
                      T* out, std::int64_t out_stride);

template <class T, class Element = T>
struct Tiles {
  static constexpr int kMost = 12;

  int rows, columns;  // of the largest tile; all have so many columns
  Tile<T, Element> of_rows[kMost];
  Tile<T, Element> turned[kMost];  // b[l][j] lies at b[j * b_stride + l]; of 4-byte elements only

  // For 1..rows rows.
  Tile<T, Element> operator()(std::int64_t of) const { return of_rows[of - 1]; }
};

// to[l * to_stride + j] = from[j * step + l] for l below `count` and for as many j as a vector has floats; 4-byte
// elements.
using Turn = void (*)(const void* from, std::int64_t step, std::int64_t count, void* to, std::int64_t to_stride);

// x = e^(x * scale - base) in place; returns the sum.
template <class T>
using Exponentials = T (*)(T* x, std::int64_t count, T scale, T base);

// to[l * to_stride + j] = the pair of from[2 * l * step + j] and from[(2 * l + 1) * step + j], likewise.
using Zip = void (*)(const std::uint16_t* from, std::int64_t step, std::int64_t count, Pair* to,
                     std::int64_t to_stride);

// The nearest bfloat16 numbers, of two the even one.
using Narrow = void (*)(const float* from, std::int64_t count, std::uint16_t* to);

// The largest x * scale; NaN if there is one.
using Largest = float (*)(const float* x, std::int64_t count, float scale);

// sums[j] += rows[i][j] * factors[i], in the order of i, for each of `columns` columns j.
using AddRows = void (*)(const float* const* rows, const float* factors, std::int64_t count, std::int64_t columns,
                         float* sums);

struct Kernels {
  Tiles<float> floats;
  Tiles<double> doubles;
  Tiles<std::uint64_t> integers;  // their sums wrap round, whatever the sign and width
  Tiles<float, Pair> pairs;       // of no rows where the CPU has no instruction for them
  Exponentials<float> exponentials;
  Largest largest;
  Turn turn;
  Zip zip;
  Narrow narrow;
  AddRows add_rows;
};

// Those for the widest vectors that this CPU has.
const Kernels& kernels();

}  // namespace mctl::shim
