// Blocks of MR rows and NV vectors of columns, summed in registers.
#include "product.h"

namespace mctl {
namespace {

// The row `a` + i of four begins `i` strides after it: an address that the processor adds up, where a register for each
// row would be too many.
constexpr int kTogether = 4;

// What a block does with its sums.
struct Ending {
  const Floats* bias;
  Rows<const float> residual;  // of no data where there is none
  bool relu;
};

// MR rows and NV vectors of columns.
template <int MR, int NV, class Element>
[[gnu::noinline]] void block(const Terms& k, Rows<const Element> a, const Packed<Element>& b, std::int64_t column,
                             const Ending& ending, Rows<float> to) {
  constexpr int kVectors = kPanel / kLanes;
  const Element* rows[(MR + kTogether - 1) / kTogether];
#pragma GCC unroll 16
  for (int i = 0; i < MR; i += kTogether) rows[i / kTogether] = a[i];
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i)  // the stores would wait for memory, and what follows for them
#pragma GCC unroll 16
    for (int j = 0; j < NV; ++j) __builtin_prefetch(to[i] + j * kLanes, 1);
  const Element* weights = b.data + column / kPanel * b.panel + column % kPanel;
  const std::int64_t stride = a.stride;
  Floats sums[MR][NV];
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i)
#pragma GCC unroll 16
    for (int j = 0; j < NV; ++j) sums[i][j] = Floats{};
  const std::int64_t* place = k.places.data();
  const std::int64_t* const last = place + k.places.size();
  do {
    for (std::int64_t l = *place, end = *place + k.length; l < end; ++l, weights += b.step) {
      decltype(load(weights)) w[NV];
#pragma GCC unroll 16
      for (int j = 0; j < NV; ++j) w[j] = load(weights + j / kVectors * b.panel + j % kVectors * kLanes);
#pragma GCC unroll 16
      for (int i = 0; i < MR; ++i) {
        const auto factor = all(rows[i / kTogether][i % kTogether * stride + l]);
#pragma GCC unroll 16
        for (int j = 0; j < NV; ++j) sums[i][j] = plus_product(sums[i][j], factor, w[j]);
      }
    }
  } while (++place != last);
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i)
#pragma GCC unroll 16
    for (int j = 0; j < NV; ++j) sums[i][j] += ending.bias[j];
  if (ending.residual.data != nullptr)
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i)
#pragma GCC unroll 16
      for (int j = 0; j < NV; ++j) sums[i][j] += load(ending.residual[i] + j * kLanes);
  if (ending.relu)
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i)
#pragma GCC unroll 16
      for (int j = 0; j < NV; ++j) sums[i][j] = at_least(sums[i][j], 0.0f);
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i)
#pragma GCC unroll 16
    for (int j = 0; j < NV; ++j) store(to[i] + j * kLanes, sums[i][j]);
}

// Rows that one block has at most, so that the sums of NV vectors, the weights and a factor fit into the registers.
template <int NV>
inline constexpr int kRows = std::clamp((kRegisters - NV - 1) / NV, 1, 12);

template <int NV, class Element, int MR = kRows<NV>>
void rows_of(std::int64_t count, const Terms& k, Rows<const Element> a, const Packed<Element>& b, std::int64_t column,
             const Ending& ending, Rows<float> to) {
  if constexpr (MR > 0) {
    if (count == MR)
      block<MR, NV>(k, a, b, column, ending, to);
    else
      rows_of<NV, Element, MR - 1>(count, k, a, b, column, ending, to);
  }
}

// Columns [begin, end) of all rows, in blocks of NV vectors and of about equal numbers of rows.
template <int NV, class Element>
std::int64_t columns_of(std::int64_t rows, const Terms& k, Rows<const Element> a, const Packed<Element>& b,
                        std::int64_t begin, std::int64_t end, const Finish& finish, Rows<float> out) {
  constexpr std::int64_t kWidth = NV * kLanes;
  const std::int64_t blocks = (rows + kRows<NV> - 1) / kRows<NV>;
  const bool relu = finish.activation == Activation::relu;
  for (; begin + kWidth - kLanes < end; begin += kWidth) {
    const std::int64_t width = std::min(kWidth, b.columns - begin);
    const bool at_once = width == kWidth && (relu || finish.activation == Activation::none);
    Floats bias[NV] = {};
    if (finish.bias != nullptr) std::memcpy(bias, finish.bias + begin, static_cast<std::size_t>(width) * sizeof(float));
    Ending ending{bias, {nullptr, finish.residual_stride}, relu && at_once};
    for (std::int64_t i = 0, row = 0; i < blocks; ++i) {
      const std::int64_t next = rows * (i + 1) / blocks;
      const float* const residual =
          finish.residual == nullptr ? nullptr : finish.residual + row * finish.residual_stride + begin;
      float beside[kRows<NV> * kWidth];
      const Rows<float> to = width == kWidth ? Rows<float>{out[row] + begin, out.stride} : Rows<float>{beside, kWidth};
      if (at_once) ending.residual.data = residual;
      rows_of<NV>(next - row, k, Rows<const Element>{a[row], a.stride}, b, begin, ending, to);
      if (!at_once)
        for (std::int64_t j = 0; j < next - row; ++j)
          finish_row(to[j], residual == nullptr ? nullptr : residual + j * finish.residual_stride, finish.activation,
                     width, out[row + j] + begin);
      row = next;
    }
  }
  return begin;
}

// Few rows take more columns at once, so that there are enough sums for the adders to be busy.
template <class Element>
void columns(std::int64_t rows, const Terms& k, Rows<const Element> a, const Packed<Element>& b, std::int64_t begin,
             std::int64_t end, const Finish& finish, Rows<float> out) {
  if (rows <= kRows<8>) begin = columns_of<8>(rows, k, a, b, begin, end, finish, out);
  if (rows <= kRows<4>) begin = columns_of<4>(rows, k, a, b, begin, end, finish, out);
  if (begin + kLanes < end) begin = columns_of<2>(rows, k, a, b, begin, end, finish, out);
  columns_of<1>(rows, k, a, b, begin, end, finish, out);
}

}  // namespace

const std::int64_t kBlockRows = kRows<2>;

void finish_row(const float* from, const float* residual, Activation activation, std::int64_t columns, float* to) {
  for (std::int64_t j = 0; j < columns; j += kLanes) {
    const int count = static_cast<int>(std::min<std::int64_t>(columns - j, kLanes));
    Floats y = load(from + j, count);
    if (residual != nullptr) y += load(residual + j, count);
    store(to + j, activated(y, activation), count);
  }
}

void multiply(std::int64_t rows, const Terms& k, Rows<const float> a, const Packed<float>& b, std::int64_t begin,
              std::int64_t end, const Finish& finish, Rows<float> out) {
  columns(rows, k, a, b, begin, end, finish, out);
}

void multiply(std::int64_t rows, const Terms& k, Rows<const Pair> a, const Packed<Pair>& b, std::int64_t begin,
              std::int64_t end, const Finish& finish, Rows<float> out) {
  columns(rows, k, a, b, begin, end, finish, out);
}

}  // namespace mctl
