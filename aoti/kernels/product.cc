// Blocks of MR rows and NV vectors of columns, summed in registers.
#include "product.h"

namespace mctl {
namespace {

// The row `a` + i of four begins `i` strides after it: an address that the processor adds up, where a register for each
// row would be one too many.
constexpr int kTogether = 4;

template <int MR, int NV, class Element>
void block(std::int64_t k, Rows<const Element> a, const Packed<Element>& b, std::int64_t column, std::int64_t row,
           const Finish& finish, Rows<float> out) {
  constexpr bool kOnePanel = NV * kLanes <= kPanel;
  const Element* weights[kOnePanel ? 1 : NV];
  for (int j = 0; j < (kOnePanel ? 1 : NV); ++j) {
    const std::int64_t at = column + j * kLanes;
    weights[j] = b.data + at / kPanel * b.panel + at % kPanel;
  }
  const Element* rows[(MR + kTogether - 1) / kTogether];
  for (int i = 0; i < MR; i += kTogether) rows[i / kTogether] = a[row + i];
  const std::int64_t stride = a.stride;
  for (int i = 0; i < MR; ++i)  // the stores would wait for memory, and what follows for them
    for (int j = 0; j < NV; ++j) __builtin_prefetch(out[row + i] + column + j * kLanes, 1);
  Floats sums[MR][NV] = {};
  for (std::int64_t l = 0; l < k; ++l) {
    decltype(load(weights[0])) w[NV];
    for (int j = 0; j < NV; ++j)
      w[j] = load(kOnePanel ? weights[0] + l * b.step + j * kLanes : weights[j] + l * b.step);
    for (int i = 0; i < MR; ++i) {
      const auto x = all(rows[i / kTogether][i % kTogether * stride + l]);
      for (int j = 0; j < NV; ++j) sums[i][j] = plus_product(sums[i][j], x, w[j]);
    }
  }
#pragma GCC unroll 8  // otherwise the sums go through memory
  for (int j = 0; j < NV; ++j) {
    const std::int64_t at = column + j * kLanes;
    const int count = static_cast<int>(std::clamp<std::int64_t>(b.columns - at, 0, kLanes));
    if (count == 0) break;
    const Floats bias = finish.bias == nullptr ? Floats{} : load(finish.bias + at, count);
#pragma GCC unroll 12
    for (int i = 0; i < MR; ++i) {
      Floats y = sums[i][j] + bias;
      if (finish.residual != nullptr) y += load(finish.residual + (row + i) * finish.residual_stride + at, count);
      store(out[row + i] + at, y, count);
    }
  }
}

// Rows that one block has at most, so that the sums of NV vectors, the weights and a factor fit into the registers.
template <int NV>
inline constexpr int kRows = std::clamp((kRegisters - NV - 1) / NV, 1, 12);

template <int NV, class Element, int MR = kRows<NV>>
void rows_of(std::int64_t rows, std::int64_t k, Rows<const Element> a, const Packed<Element>& b, std::int64_t column,
             std::int64_t row, const Finish& finish, Rows<float> out) {
  if constexpr (MR > 0) {
    if (rows == MR)
      block<MR, NV>(k, a, b, column, row, finish, out);
    else
      rows_of<NV, Element, MR - 1>(rows, k, a, b, column, row, finish, out);
  }
}

void activate(std::int64_t count, Activation activation, float* y) {
  for (std::int64_t i = 0; i < count; i += kLanes) {
    const int lanes = static_cast<int>(std::min<std::int64_t>(count - i, kLanes));
    store(y + i, activated(load(y + i, lanes), activation), lanes);
  }
}

// Columns [begin, end) of all rows, in blocks of NV vectors and of about equal numbers of rows.
template <int NV, class Element>
std::int64_t columns_of(std::int64_t rows, std::int64_t k, Rows<const Element> a, const Packed<Element>& b,
                        std::int64_t begin, std::int64_t end, const Finish& finish, Rows<float> out) {
  const std::int64_t blocks = (rows + kRows<NV> - 1) / kRows<NV>;
  for (; begin + (NV > 2 ? NV * kLanes : 1) <= end; begin += NV * kLanes)
    for (std::int64_t i = 0, row = 0; i < blocks; ++i) {
      const std::int64_t next = rows * (i + 1) / blocks;
      rows_of<NV>(next - row, k, a, b, begin, row, finish, out);
      if (finish.activation != Activation::none)
        for (; row < next; ++row)
          activate(std::min<std::int64_t>(NV * kLanes, b.columns - begin), finish.activation, out[row] + begin);
      row = next;
    }
  return begin;
}

// Few rows take more columns at once, so that there are enough sums for the adders to be busy.
template <class Element>
void columns(std::int64_t rows, std::int64_t k, Rows<const Element> a, const Packed<Element>& b, std::int64_t begin,
             std::int64_t end, const Finish& finish, Rows<float> out) {
  if (rows <= kRows<8>) begin = columns_of<8>(rows, k, a, b, begin, end, finish, out);
  if (rows <= kRows<4>) begin = columns_of<4>(rows, k, a, b, begin, end, finish, out);
  columns_of<2>(rows, k, a, b, begin, end, finish, out);
}

}  // namespace

const std::int64_t kBlockRows = kRows<2>;

void multiply(std::int64_t rows, std::int64_t k, Rows<const float> a, const Packed<float>& b, std::int64_t begin,
              std::int64_t end, const Finish& finish, Rows<float> out) {
  columns(rows, k, a, b, begin, end, finish, out);
}

void multiply(std::int64_t rows, std::int64_t k, Rows<const Pair> a, const Packed<Pair>& b, std::int64_t begin,
              std::int64_t end, const Finish& finish, Rows<float> out) {
  columns(rows, k, a, b, begin, end, finish, out);
}

}  // namespace mctl
