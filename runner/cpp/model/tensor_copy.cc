#include "model/tensor_copy.h"

#include <cstring>

namespace mctl {
namespace {

template <class T>
void copy_row(std::byte* to, const std::byte* from, std::int64_t size, std::int64_t stride) {
  for (std::int64_t i = 0; i < size; ++i)
    std::memcpy(to + i * static_cast<std::int64_t>(sizeof(T)), from + i * stride * static_cast<std::int64_t>(sizeof(T)),
                sizeof(T));
}

void copy_row(std::byte* to, const std::byte* from, std::int64_t size, std::int64_t stride, std::size_t item) {
  switch (item) {
    case 1:
      return copy_row<std::uint8_t>(to, from, size, stride);
    case 2:
      return copy_row<std::uint16_t>(to, from, size, stride);
    case 4:
      return copy_row<std::uint32_t>(to, from, size, stride);
    default:
      return copy_row<std::uint64_t>(to, from, size, stride);
  }
}

// The number of elements if they lie in row-major order already, else -1.
std::int64_t row_major_count(std::span<const std::int64_t> sizes, std::span<const std::int64_t> strides) {
  std::int64_t count = 1;
  for (std::size_t axis = sizes.size(); axis-- > 0; count *= sizes[axis])
    if (sizes[axis] != 1 && strides[axis] != count) return -1;
  return count;
}

// Returns where the next element goes.
std::byte* copy(std::byte* to, const std::byte* from, std::span<const std::int64_t> sizes,
                std::span<const std::int64_t> strides, std::size_t item) {
  const auto bytes = static_cast<std::int64_t>(item);
  if (const std::int64_t count = row_major_count(sizes, strides); count >= 0) {
    if (count > 0) std::memcpy(to, from, static_cast<std::size_t>(count * bytes));
    return to + count * bytes;
  }
  if (sizes.size() == 1) {
    copy_row(to, from, sizes[0], strides[0], item);
    return to + sizes[0] * bytes;
  }
  for (std::int64_t i = 0; i < sizes[0]; ++i)
    to = copy(to, from + i * strides[0] * bytes, sizes.subspan(1), strides.subspan(1), item);
  return to;
}

}  // namespace

void copy_row_major(std::byte* to, const std::byte* from, std::span<const std::int64_t> sizes,
                    std::span<const std::int64_t> strides, std::size_t item) {
  for (const std::int64_t size : sizes)
    if (size == 0) return;  // the strides of no elements say nothing
  copy(to, from, sizes, strides, item);
}

}  // namespace mctl
