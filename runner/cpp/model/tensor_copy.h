// Copies elements with any strides into row-major order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace mctl {

// `strides` count elements. Writes product(sizes) * item bytes to `to`.
void copy_row_major(std::byte* to, const std::byte* from, std::span<const std::int64_t> sizes,
                    std::span<const std::int64_t> strides, std::size_t item);

}  // namespace mctl
