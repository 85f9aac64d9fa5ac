// Tensors and their handles. A handle is looked up, never followed: one that is wrong, or was deleted, is an error.
#pragma once

#include <cstddef>
#include <cstdint>

#include "dtype.h"
#include "failure.h"
#include "memory.h"

namespace mctl::shim {

using Handle = void*;

constexpr std::int64_t kMaxRank = 24;

struct Tensor {
  Block* block = nullptr;  // of its storage; null where the memory is somebody else's
  std::byte* storage = nullptr;
  std::int64_t storage_bytes = 0;
  std::int64_t offset = 0, count = 0;  // elements
  std::int32_t dtype = 0;
  std::int32_t rank = 0;
  std::int64_t sizes[kMaxRank], strides[kMaxRank];

  std::int64_t item() const { return static_cast<std::int64_t>(item_size(dtype)); }
  std::byte* data() const { return storage + offset * item(); }
  bool is_contiguous() const;
};

// The tensor of a handle; null, with the failure's text, if there is none.
Tensor* find(Handle handle);

// Puts the tensor, with its share of the block, where the handle finds it. Where that fails the share is given back.
AOTITorchError make(const Tensor& tensor, Handle* handle);

// Takes the handle back, and the tensor's share of the block.
AOTITorchError remove(Handle handle);

// Fills in the shape; `bytes` is what its storage needs at least. Fails where it is no shape, or overflows.
AOTITorchError shape(Tensor& tensor, std::int64_t rank, const std::int64_t* sizes, const std::int64_t* strides,
                     std::int64_t offset, std::int32_t dtype, std::int64_t* bytes);

// A new tensor with this shape, uninitialised.
AOTITorchError make_empty(std::int64_t rank, const std::int64_t* sizes, const std::int64_t* strides, std::int32_t dtype,
                          Handle* handle);

// Another view of `self`'s storage.
AOTITorchError make_view(const Tensor& self, std::int64_t rank, const std::int64_t* sizes, const std::int64_t* strides,
                         std::int64_t offset, std::int32_t dtype, Handle* handle);

// Copies elements, cast to `to`'s dtype. `from` is broadcast to `to`'s shape. Fails where that cannot be.
AOTITorchError copy(const Tensor& to, const Tensor& from);

// Writes torch's strides for another tensor like this one: the same if it fills its memory, however its axes are
// ordered; else those without the gaps.
void dense(const Tensor& tensor, std::int64_t* strides);

// Writes row-major strides.
void row_major(std::int64_t rank, const std::int64_t* sizes, std::int64_t* strides);

}  // namespace mctl::shim
