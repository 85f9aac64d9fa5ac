// Compressed request bodies.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

#include "doors/buffer.h"
#include "format/result.h"

namespace mctl {

// Undoes `gzip` or `deflate` (with zlib's frame or, as some clients send it, without); checksums are verified.
// Code::unsupported for another encoding, Code::invalid for bad data, Code::too_large beyond `limit` bytes, and for
// what is over 1 MiB beyond 100 times the compressed size: no model's input is as monotonous, but an attack is.
Result<Buffer> inflate(std::string_view encoding, std::span<const std::byte> data, std::size_t limit);

// The most bytes that it would hold meanwhile.
std::size_t most_inflated(std::string_view encoding, std::span<const std::byte> data, std::size_t limit);

}  // namespace mctl
