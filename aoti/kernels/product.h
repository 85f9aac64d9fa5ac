// The product of rows with packed weights, in registers: what linear layers, convolutions and attention are made of.
//
// Weights of n outputs and k inputs are packed in panels of 32 outputs, [ceil(n / 32)][k][32], the last one filled up
// with zeros. In bfloat16 two inputs lie side by side, [ceil(n / 32)][ceil(k / 2)][32][2], and where k is odd a zero
// follows the last one: a pair is an element like a float, and there are half as many. Sums are made in the order of k,
// one for each element: a row's result depends neither on the rows beside it nor on the number of threads.
//
// The shim has products and attention of its own (runner/cpp/shim/tiles.h): they take operands of any dtype and strides
// as libtorch does, pack them at each call, and are chosen by the CPU when they are loaded. These know their weights
// beforehand and what follows the sums, and are compiled for one machine into a variant that needs nothing beside it.
#pragma once

#include <algorithm>
#include <span>

#include "activation.h"

namespace mctl {

inline constexpr std::int64_t kPanel = 32;

inline std::int64_t panels_of(std::int64_t columns) { return (columns + kPanel - 1) / kPanel; }

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

// The terms of a sum: `length` of them side by side, in one place or, as the taps of a convolution lie, in several,
// each so far from where a row of factors begins. The weights go on from place to place.
struct Terms {
  Terms(std::int64_t count) : length(count) {}
  Terms(std::int64_t count, std::span<const std::int64_t> of) : length(count), places(of) {}

  static constexpr std::int64_t kHere[] = {0};
  std::int64_t length;
  std::span<const std::int64_t> places = kHere;
};

// to = activation(from + residual), where there is one.
void finish_row(const float* from, const float* residual, Activation activation, std::int64_t columns, float* to);

// Rows that a block of 2 vectors of columns has at most.
extern const std::int64_t kBlockRows;

// out[i][j] = finish(sum over l of a[i][l] * b[l][j]) for columns [begin, end); `begin` starts a panel.
void multiply(std::int64_t rows, const Terms& k, Rows<const float> a, const Packed<float>& b, std::int64_t begin,
              std::int64_t end, const Finish& finish, Rows<float> out);
void multiply(std::int64_t rows, const Terms& k, Rows<const Pair> a, const Packed<Pair>& b, std::int64_t begin,
              std::int64_t end, const Finish& finish, Rows<float> out);

}  // namespace mctl
