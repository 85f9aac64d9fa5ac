// The product of rows with packed weights, in registers: what linear layers, convolutions and attention are made of.
//
// Weights of n outputs and k inputs are packed in panels of 32 outputs, [ceil(n / 32)][k][32], the last one filled up
// with zeros. In bfloat16 two inputs lie side by side, [ceil(n / 32)][ceil(k / 2)][32][2], and where k is odd a zero
// follows the last one: a pair is an element like a float, and there are half as many. Sums are made in the order of k,
// one for each element: a row's result depends neither on the rows beside it nor on the number of threads.
#pragma once

#include <algorithm>

#include "activation.h"

namespace mctl {

inline constexpr std::int64_t kPanel = 32;

// One operand of a product: `columns` packed in panels that lie `panel` elements (float or Pair) apart, `step` elements
// from k to k + 1.
template <class Element>
struct Packed {
  const Element* data;
  std::int64_t columns;
  std::int64_t panel;
  std::int64_t step = kPanel;
};

// What happens to the sums of a row before they are stored.
struct Finish {
  const float* bias = nullptr;      // [columns]
  const float* residual = nullptr;  // rows of the same columns
  std::int64_t residual_stride = 0;
  Activation activation = Activation::none;
};

// Rows of floats or pairs, `stride` apart.
template <class Element>
struct Rows {
  Element* data;
  std::int64_t stride;

  Element* operator[](std::int64_t row) const { return data + row * stride; }
};

// Rows that a block of 2 vectors of columns has at most.
extern const std::int64_t kBlockRows;

// out[i][j] = finish(sum over l of a[i][l] * b[l][j]) for columns [begin, end); `begin` starts a panel.
void multiply(std::int64_t rows, std::int64_t k, Rows<const float> a, const Packed<float>& b, std::int64_t begin,
              std::int64_t end, const Finish& finish, Rows<float> out);
void multiply(std::int64_t rows, std::int64_t k, Rows<const Pair> a, const Packed<Pair>& b, std::int64_t begin,
              std::int64_t end, const Finish& finish, Rows<float> out);

}  // namespace mctl
