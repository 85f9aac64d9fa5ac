// Tensors that AOTI makes: new ones, views, and copies.
#include <cstring>

#include "tensor.h"

namespace mctl::shim {
namespace {

constexpr std::int32_t kCpu = 0, kStrided = 0;

AOTITorchError check_device(std::int32_t device_type) {
  return device_type == kCpu ? kDone : fail("a tensor on device type %d: this library knows the CPU only", device_type);
}

AOTITorchError copy_of(const Tensor& tensor, const std::int64_t* strides, Handle* result) {
  Handle made = nullptr;
  if (make_empty(tensor.rank, tensor.sizes, strides, tensor.dtype, &made) != kDone) return kFailed;
  copy(*find(made), tensor);  // of the same dtype and shape: it cannot fail
  *result = made;
  return kDone;
}

}  // namespace

MCTL_EXPORT AOTITorchError aoti_torch_empty_strided(std::int64_t rank, const std::int64_t* sizes,
                                                    const std::int64_t* strides, std::int32_t dtype,
                                                    std::int32_t device_type, std::int32_t, Handle* result) {
  if (check_device(device_type) != kDone) return kFailed;
  return make_empty(rank, sizes, strides, dtype, result);
}

MCTL_EXPORT AOTITorchError aoti_torch_empty_strided_pinned(std::int64_t rank, const std::int64_t* sizes,
                                                           const std::int64_t* strides, std::int32_t dtype,
                                                           std::int32_t device_type, std::int32_t index,
                                                           Handle* result) {
  return aoti_torch_empty_strided(rank, sizes, strides, dtype, device_type, index, result);
}

MCTL_EXPORT AOTITorchError aoti_torch_create_tensor_from_blob(void* data, std::int64_t rank, const std::int64_t* sizes,
                                                              const std::int64_t* strides, std::int64_t offset,
                                                              std::int32_t dtype, std::int32_t device_type,
                                                              std::int32_t, Handle* result) {
  if (check_device(device_type) != kDone) return kFailed;
  Tensor tensor;
  tensor.storage = static_cast<std::byte*>(data);
  if (shape(tensor, rank, sizes, strides, offset, dtype, &tensor.storage_bytes) != kDone) return kFailed;
  return make(tensor, result);
}

MCTL_EXPORT AOTITorchError aoti_torch_create_tensor_from_blob_v2(void* data, std::int64_t rank,
                                                                 const std::int64_t* sizes, const std::int64_t* strides,
                                                                 std::int64_t offset, std::int32_t dtype,
                                                                 std::int32_t device_type, std::int32_t index,
                                                                 Handle* result, std::int32_t layout,
                                                                 const std::uint8_t*, std::int64_t) {
  if (layout != kStrided) return fail("a tensor of layout %d: this library knows strided ones only", layout);
  return aoti_torch_create_tensor_from_blob(data, rank, sizes, strides, offset, dtype, device_type, index, result);
}

// --- views ----------------------------------------------------------------------------------------------------------

MCTL_EXPORT AOTITorchError aoti_torch__reinterpret_tensor(Handle self, std::int64_t rank, const std::int64_t* sizes,
                                                          const std::int64_t* strides, std::int64_t offset,
                                                          Handle* result) {
  const Tensor* tensor = find(self);
  if (tensor == nullptr) return kFailed;
  std::int64_t begin = 0;
  if (__builtin_add_overflow(tensor->offset, offset, &begin)) return fail("a view that begins nowhere");
  return make_view(*tensor, rank, sizes, strides, begin, tensor->dtype, result);
}

MCTL_EXPORT AOTITorchError aoti_torch_as_strided(Handle self, const std::int64_t* sizes, const std::int64_t* strides,
                                                 Handle* result) {
  const Tensor* tensor = find(self);
  if (tensor == nullptr) return kFailed;
  return make_view(*tensor, tensor->rank, sizes, strides, tensor->offset, tensor->dtype, result);
}

MCTL_EXPORT AOTITorchError aoti_torch__alloc_from_pool(Handle self, std::int64_t offset_bytes, std::int32_t dtype,
                                                       std::int64_t rank, const std::int64_t* sizes,
                                                       const std::int64_t* strides, Handle* result) {
  const Tensor* tensor = find(self);
  if (tensor == nullptr) return kFailed;
  const auto item = static_cast<std::int64_t>(item_size(dtype));
  if (item == 0 || offset_bytes % item != 0)
    return fail("a tensor of dtype %d cannot begin at byte %lld", dtype, static_cast<long long>(offset_bytes));
  return make_view(*tensor, rank, sizes, strides, offset_bytes / item, dtype, result);
}

MCTL_EXPORT AOTITorchError aoti_torch_new_tensor_handle(Handle self, Handle* result) {
  const Tensor* tensor = find(self);
  if (tensor == nullptr) return kFailed;
  if (tensor->block != nullptr) share(tensor->block);
  return make(*tensor, result);
}

MCTL_EXPORT AOTITorchError aoti_torch_new_uninitialized_tensor(Handle* result) { return make(Tensor{}, result); }

MCTL_EXPORT AOTITorchError aoti_torch_assign_tensors(Handle source, Handle target) {
  const Tensor* from = find(source);
  Tensor* to = from != nullptr ? find(target) : nullptr;
  if (to == nullptr) return kFailed;
  Block* old = to->block;
  if (from->block != nullptr) share(from->block);
  *to = *from;
  if (old != nullptr) release(old);
  return kDone;
}

MCTL_EXPORT AOTITorchError aoti_torch_assign_tensors_out(Handle source, Handle* result) {
  return aoti_torch_new_tensor_handle(source, result);
}

// --- copies ---------------------------------------------------------------------------------------------------------

MCTL_EXPORT AOTITorchError aoti_torch_clone(Handle self, Handle* result) {
  const Tensor* tensor = find(self);
  if (tensor == nullptr) return kFailed;
  std::int64_t strides[kMaxRank];
  dense(*tensor, strides);
  return copy_of(*tensor, strides, result);
}

// Of the whole memory that the tensor spans, overlaps and gaps too.
MCTL_EXPORT AOTITorchError aoti_torch_clone_preserve_strides(Handle self, Handle* result) {
  const Tensor* tensor = find(self);
  if (tensor == nullptr) return kFailed;
  Handle made = nullptr;
  if (make_empty(tensor->rank, tensor->sizes, tensor->strides, tensor->dtype, &made) != kDone) return kFailed;
  const Tensor* twin = find(made);
  if (twin->storage_bytes > 0) std::memcpy(twin->data(), tensor->data(), static_cast<std::size_t>(twin->storage_bytes));
  *result = made;
  return kDone;
}

MCTL_EXPORT AOTITorchError aoti_torch_copy_(Handle self, Handle source, std::int32_t) {
  const Tensor* to = find(self);
  const Tensor* from = to != nullptr ? find(source) : nullptr;
  return from != nullptr ? copy(*to, *from) : kFailed;
}

MCTL_EXPORT AOTITorchError aoti_torch_tensor_copy_(Handle source, Handle target) {
  return aoti_torch_copy_(target, source, 0);
}

}  // namespace mctl::shim
