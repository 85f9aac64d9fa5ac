// Reads the header of a safetensors member: https://github.com/huggingface/safetensors#format, with each tensor that
// does not only fill a gap on a 64-byte boundary. Mirrors bundle_format/tensors.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "format/contract.h"
#include "format/result.h"

namespace mctl {

struct StoredTensor {
  Dtype dtype = Dtype::f32;
  std::vector<std::int64_t> shape;
  std::span<std::byte> data;  // within the member's bytes; row-major
};

using StoredTensors = std::map<std::string, StoredTensor, std::less<>>;

// Code::damaged says what breaks the format.
Result<StoredTensors> read_tensors(std::span<std::byte> member);

struct OutputTensor {
  std::string name;
  Dtype dtype = Dtype::f32;
  std::vector<std::int64_t> shape;
  std::span<const std::byte> data;
};

// What precedes the tensors' bytes in a file; they follow one after another, not aligned.
std::string tensors_header(std::span<const OutputTensor> tensors);

}  // namespace mctl
