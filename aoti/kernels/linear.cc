// mctl::mctl_linear(x [..., k], packed, bias [n]?, residual [..., n]?, n, act) -> [..., n]
//
// Weights packed in bfloat16 make products of bfloat16, x being rounded to it; all else is float32.
#include "linear.h"

#include <vector>

#include "tensor.h"

namespace mctl {
namespace {

// The stride of rows, where all axes but the last are as one; -1 where they are not.
std::int64_t row_stride(const View& x) {
  if (x.rank > 0 && x.sizes[x.rank - 1] > 1 && x.strides[x.rank - 1] != 1) return -1;
  std::int64_t stride = -1, next = 0;
  for (std::int64_t axis = x.rank - 1; axis-- > 0;) {
    if (x.sizes[axis] == 1) continue;
    if (stride < 0)
      stride = x.strides[axis];
    else if (x.strides[axis] != next)
      return -1;
    next = x.strides[axis] * x.sizes[axis];
  }
  return stride < 0 ? (x.rank > 0 ? x.sizes[x.rank - 1] : 1) : stride;
}

// Rows that lie anyhow, as a row-major copy.
void copy_rows(const View& x, std::int64_t rows, std::int64_t columns, float* to) {
  const std::int64_t last = x.strides[x.rank - 1];
  for (std::int64_t row = 0; row < rows; ++row) {
    std::int64_t at = 0, rest = row;
    for (std::int64_t axis = x.rank - 1; axis-- > 0; rest /= x.sizes[axis])
      at += rest % x.sizes[axis] * x.strides[axis];
    for (std::int64_t i = 0; i < columns; ++i) *to++ = x.data[at + i * last];
  }
}

template <int Use>
Rows<const float> rows_of(const View& x, std::int64_t rows, std::int64_t columns) {
  if (const std::int64_t stride = row_stride(x); stride >= 0) return {x.data, stride};
  float* const copy = scratch<Use>(rows * columns);
  copy_rows(x, rows, columns, copy);
  return {copy, columns};
}

}  // namespace
}  // namespace mctl

MCTL_ENTRY std::int32_t aoti_torch_cpu_mctl_linear(AtenTensorHandle input, AtenTensorHandle weight,
                                                   AtenTensorHandle* bias, AtenTensorHandle* residual, std::int64_t n,
                                                   std::int64_t act, AtenTensorHandle* out) {
  using namespace mctl;
  return guarded([&] {
    const View x(input), packed(weight);
    x.require_float(x.rank);
    require(x.rank >= 1);
    const std::int64_t k = x.sizes[x.rank - 1];
    const std::int64_t panels = panels_of(n);
    if (packed.is_bfloat16())
      packed.require_pairs({panels, elements<Pair>(k), kPanel, 2});
    else
      packed.require_float({panels, k, kPanel});
    std::vector<std::int64_t> sizes(x.sizes, x.sizes + x.rank), strides(sizes.size());
    sizes.back() = n;
    std::int64_t rows = 1, step = n;
    strides.back() = 1;
    for (std::size_t axis = sizes.size() - 1; axis-- > 0; step *= sizes[axis]) {
      strides[axis] = step;
      rows *= sizes[axis];
    }
    Finish finish;
    finish.activation = static_cast<Activation>(act);
    finish.bias = bias_of(bias, n);
    if (residual != nullptr) {
      const View r(*residual);
      r.require_float(x.rank);
      require(std::equal(sizes.begin(), sizes.end(), r.sizes));
      const Rows<const float> added = rows_of<1>(r, rows, n);
      finish.residual = added.data;
      finish.residual_stride = added.stride;
    }
    const View y = empty(x.rank, sizes.data(), strides.data(), out);
    if (rows == 0) return;
    const Rows<const float> from = rows_of<2>(x, rows, k);
    if (packed.is_bfloat16())
      linear<Pair>(rows, k, from, {packed.as<Pair>(), n, elements<Pair>(k) * kPanel}, finish, {y.data, n});
    else
      linear<float>(rows, k, from, {packed.as<float>(), n, k * kPanel}, finish, {y.data, n});
  });
}
