// The innermost loops of products and of softmax, in one version for each width of vectors (tiles_*.cc).
#pragma once

#include <cstdint>

namespace mctl::shim {

// out[i][j] = the sum over l of a[i][l] * b[l][j], in the order of l, for some rows i and a fixed number of columns j:
// so a row's numbers do not depend on what is computed beside it.
template <class T>
using Tile = void (*)(std::int64_t k, const T* a, std::int64_t a_stride, const T* b, std::int64_t b_stride, T* out,
                      std::int64_t out_stride);

template <class T>
struct Tiles {
  static constexpr int kMost = 12;

  int rows, columns;  // of the largest tile; all have so many columns
  Tile<T> of_rows[kMost];

  // For 1..rows rows.
  Tile<T> operator()(std::int64_t of) const { return of_rows[of - 1]; }
};

// x = e^(x * scale - base) in place; returns the sum.
template <class T>
using Exponentials = T (*)(T* x, std::int64_t count, T scale, T base);

struct Kernels {
  Tiles<float> floats;
  Tiles<double> doubles;
  Tiles<std::uint64_t> integers;  // their sums wrap round, whatever the sign and width
  Exponentials<float> exponentials;
};

// Those for the widest vectors that this CPU has.
const Kernels& kernels();

}  // namespace mctl::shim
