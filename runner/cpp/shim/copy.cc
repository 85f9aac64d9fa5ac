// Copying between tensors of any strides and dtypes.
#include <cstring>

#include "tensor.h"

namespace mctl::shim {
namespace {

// Rows of `size` elements, strides in elements.
using CopyRow = void (*)(std::byte* to, std::int64_t to_stride, const std::byte* from, std::int64_t from_stride,
                         std::int64_t size);

template <class To, class From>
void copy_row(std::byte* to, std::int64_t to_stride, const std::byte* from, std::int64_t from_stride,
              std::int64_t size) {
  auto* target = reinterpret_cast<To*>(to);
  const auto* source = reinterpret_cast<const From*>(from);
  for (std::int64_t i = 0; i < size; ++i) target[i * to_stride] = cast<To>(source[i * from_stride]);
}

template <std::size_t kItem>
void move_row(std::byte* to, std::int64_t to_stride, const std::byte* from, std::int64_t from_stride,
              std::int64_t size) {
  constexpr auto item = static_cast<std::int64_t>(kItem);
  if (to_stride == 1 && from_stride == 1) {
    std::memmove(to, from, static_cast<std::size_t>(size) * kItem);
    return;
  }
  for (std::int64_t i = 0; i < size; ++i) std::memcpy(to + i * to_stride * item, from + i * from_stride * item, kItem);
}

// Null: there is no such cast.
CopyRow row_of(std::int32_t to, std::int32_t from) {
  if (to == from) {
    constexpr CopyRow moves[] = {move_row<1>, move_row<2>, move_row<4>, move_row<8>, move_row<16>};
    return moves[std::bit_width(item_size(to)) - 1];
  }
  CopyRow row = nullptr;
  with_type(to, [&]<class To>(To*) { with_type(from, [&]<class From>(From*) { row = copy_row<To, From>; }); });
  return row;
}

void copy_axes(const Tensor& to, std::byte* target, const std::int64_t* from_strides, std::int64_t from_item,
               const std::byte* source, std::int32_t axis, CopyRow row) {
  if (axis >= to.rank - 1) {
    const bool scalar = to.rank == 0;
    row(target, scalar ? 1 : to.strides[axis], source, scalar ? 1 : from_strides[axis], scalar ? 1 : to.sizes[axis]);
    return;
  }
  for (std::int64_t i = 0; i < to.sizes[axis]; ++i)
    copy_axes(to, target + i * to.strides[axis] * to.item(), from_strides, from_item,
              source + i * from_strides[axis] * from_item, axis + 1, row);
}

}  // namespace

AOTITorchError copy(const Tensor& to, const Tensor& from) {
  std::int64_t strides[kMaxRank] = {};
  if (from.rank > to.rank) return fail("a tensor of %d axes is copied to one of %d", from.rank, to.rank);
  for (std::int32_t axis = 0; axis < from.rank; ++axis) {
    const std::int32_t at = to.rank - from.rank + axis;
    if (from.sizes[axis] != to.sizes[at] && from.sizes[axis] != 1)
      return fail("axis %d has the size %lld where %lld is copied to it", at, static_cast<long long>(to.sizes[at]),
                  static_cast<long long>(from.sizes[axis]));
    strides[at] = from.sizes[axis] == 1 ? 0 : from.strides[axis];
  }
  const CopyRow row = row_of(to.dtype, from.dtype);
  if (row == nullptr) return fail("dtype %d cannot be copied to dtype %d", from.dtype, to.dtype);
  if (to.count == 0) return kDone;
  if (to.dtype == from.dtype && to.count == from.count && to.is_contiguous() && from.is_contiguous())
    std::memmove(to.data(), from.data(), static_cast<std::size_t>(to.count * to.item()));
  else
    copy_axes(to, to.data(), strides, from.item(), from.data(), 0, row);
  return kDone;
}

}  // namespace mctl::shim
