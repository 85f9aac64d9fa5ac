// Compressed request bodies.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

#include "format/result.h"

namespace mctl {

// Undoes `gzip` or `deflate` (with zlib's frame or, as some clients send it, without); checksums are verified.
// Code::unsupported for another encoding, Code::too_large beyond `limit` bytes, Code::invalid for bad data.
Result<std::string> inflate(std::string_view encoding, std::span<const std::byte> data, std::size_t limit);

}  // namespace mctl
