#include "operators.h"

namespace mctl::shim {

const char* name_of(std::int32_t dtype) {
  switch (dtype) {
#define MCTL_CASE(name, number, bytes) \
  case number:                         \
    return #name;
    MCTL_DTYPES(MCTL_CASE)
#undef MCTL_CASE
    default:
      return "an unknown dtype";
  }
}

AOTITorchError find_axis(const Tensor& tensor, std::int64_t axis, std::int32_t* result) {
  const std::int64_t rank = std::max(tensor.rank, 1), at = axis < 0 ? axis + rank : axis;
  if (at < 0 || at >= rank) return fail("axis %lld of a tensor that has %d", static_cast<long long>(axis), tensor.rank);
  *result = static_cast<std::int32_t>(at);
  return kDone;
}

AOTITorchError same_dtype(const char* name, const Tensor& one, const Tensor& other) {
  if (one.dtype == other.dtype) return kDone;
  return fail("`%s` of %s and %s", name, name_of(one.dtype), name_of(other.dtype));
}

AOTITorchError refuse_dtype(const char* name, std::int32_t dtype) {
  return fail("mctl's shim has no `%s` of %s", name, name_of(dtype));
}

AOTITorchError make_rows(std::int64_t rank, const std::int64_t* sizes, std::int32_t dtype, Handle* result) {
  std::int64_t strides[kMaxRank];
  if (rank > kMaxRank) return fail("a tensor of %lld axes", static_cast<long long>(rank));
  row_major(rank, sizes, strides);
  return make_empty(rank, sizes, strides, dtype, result);
}

bool channels_last(const Tensor& tensor) {
  if (tensor.rank < 4) return false;
  std::int64_t least = 0;
  if (tensor.strides[1] == 0) return false;
  for (std::int32_t i = 0; i < tensor.rank; ++i) {
    const std::int32_t axis = i == 0 ? 1 : i < tensor.rank - 1 ? tensor.rank - i : 0;
    if (tensor.sizes[axis] == 0 || tensor.strides[axis] < least) return false;
    if (axis == 0 && least == tensor.strides[1]) return false;
    least = tensor.strides[axis] * (tensor.sizes[axis] > 1 ? tensor.sizes[axis] : 1);
  }
  return true;
}

AOTITorchError make_image(std::int64_t rank, const std::int64_t* sizes, std::int32_t dtype, bool channels_last,
                          Handle* result) {
  if (!channels_last) return make_rows(rank, sizes, dtype, result);
  std::int64_t strides[kMaxRank], step = sizes[1];
  for (std::int64_t axis = rank; axis-- > 2; step *= sizes[axis]) strides[axis] = step;
  strides[1] = 1;
  strides[0] = step;
  return make_empty(rank, sizes, strides, dtype, result);
}

}  // namespace mctl::shim
