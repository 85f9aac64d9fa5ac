// What AOTI asks of a tensor, and the numbers of dtypes, devices, layouts and memory formats.
#include "tensor.h"

namespace mctl::shim {
namespace {

// Sets `*result` to what `get` says of the tensor.
template <class T, class Get>
AOTITorchError tell(Handle handle, T* result, Get get) {
  const Tensor* tensor = find(handle);
  if (tensor == nullptr) return kFailed;
  *result = get(*tensor);
  return kDone;
}

AOTITorchError tell_axis(Handle handle, std::int64_t axis, std::int64_t* result,
                         const std::int64_t (Tensor::*list)[kMaxRank]) {
  const Tensor* tensor = find(handle);
  if (tensor == nullptr) return kFailed;
  const std::int64_t at = axis < 0 ? axis + tensor->rank : axis;
  if (at < 0 || at >= tensor->rank)
    return fail("axis %lld of a tensor that has %d", static_cast<long long>(axis), tensor->rank);
  *result = (tensor->*list)[at];
  return kDone;
}

}  // namespace

// --- numbers --------------------------------------------------------------------------------------------------------

#define MCTL_NUMBER(name, number, bytes) \
  MCTL_EXPORT std::int32_t aoti_torch_dtype_##name() { return number; }
MCTL_DTYPES(MCTL_NUMBER)
#undef MCTL_NUMBER

MCTL_EXPORT std::size_t aoti_torch_dtype_element_size(std::int32_t dtype) { return item_size(dtype); }

MCTL_EXPORT std::int32_t aoti_torch_device_type_cpu() { return 0; }
MCTL_EXPORT std::int32_t aoti_torch_device_type_cuda() { return 1; }
MCTL_EXPORT std::int32_t aoti_torch_device_type_xpu() { return 12; }
MCTL_EXPORT std::int32_t aoti_torch_device_type_mps() { return 13; }
MCTL_EXPORT std::int32_t aoti_torch_device_type_meta() { return 14; }
MCTL_EXPORT std::int32_t aoti_torch_device_type_privateuse1() { return 20; }

MCTL_EXPORT std::int32_t aoti_torch_layout_strided() { return 0; }
MCTL_EXPORT std::int32_t aoti_torch_layout_sparse_coo() { return 1; }
MCTL_EXPORT std::int32_t aoti_torch_layout_sparse_csr() { return 2; }
MCTL_EXPORT std::int32_t aoti_torch_layout__mkldnn() { return 3; }
MCTL_EXPORT std::int32_t aoti_torch_layout_sparse_csc() { return 4; }
MCTL_EXPORT std::int32_t aoti_torch_layout_sparse_bsr() { return 5; }
MCTL_EXPORT std::int32_t aoti_torch_layout_sparse_bsc() { return 6; }
MCTL_EXPORT std::int32_t aoti_torch_layout_jagged() { return 7; }

MCTL_EXPORT std::int32_t aoti_torch_memory_format_contiguous_format() { return 0; }
MCTL_EXPORT std::int32_t aoti_torch_memory_format_preserve_format() { return 1; }
MCTL_EXPORT std::int32_t aoti_torch_memory_format_channels_last() { return 2; }
MCTL_EXPORT std::int32_t aoti_torch_memory_format_channels_last_3d() { return 3; }

// The interface that this library speaks: that of torch 2.13.0, in torch's own way to write a version.
MCTL_EXPORT std::uint64_t aoti_torch_abi_version() { return std::uint64_t{2} << 56 | std::uint64_t{13} << 48; }

// What it is, and the versions of torch whose compiled code was tested with it.
MCTL_EXPORT const char* mctl_shim_abi() { return "AOTInductor's C interface of torch 2.13; tested with 2.13, 2.14"; }

// --- a tensor -------------------------------------------------------------------------------------------------------

MCTL_EXPORT AOTITorchError aoti_torch_get_data_ptr(Handle tensor, void** result) {
  return tell(tensor, result, [](const Tensor& t) -> void* { return t.data(); });
}

MCTL_EXPORT AOTITorchError aoti_torch_get_storage_size(Handle tensor, std::int64_t* result) {
  return tell(tensor, result, [](const Tensor& t) { return t.storage_bytes; });
}

MCTL_EXPORT AOTITorchError aoti_torch_get_storage_numel(Handle tensor, std::int64_t* result) {
  return tell(tensor, result, [](const Tensor& t) { return t.storage_bytes / t.item(); });
}

MCTL_EXPORT AOTITorchError aoti_torch_get_dim(Handle tensor, std::int64_t* result) {
  return tell(tensor, result, [](const Tensor& t) -> std::int64_t { return t.rank; });
}

MCTL_EXPORT AOTITorchError aoti_torch_get_numel(Handle tensor, std::int64_t* result) {
  return tell(tensor, result, [](const Tensor& t) { return t.count; });
}

MCTL_EXPORT AOTITorchError aoti_torch_get_sizes(Handle handle, std::int64_t** result) {
  Tensor* tensor = find(handle);
  if (tensor == nullptr) return kFailed;
  *result = tensor->sizes;
  return kDone;
}

MCTL_EXPORT AOTITorchError aoti_torch_get_strides(Handle handle, std::int64_t** result) {
  Tensor* tensor = find(handle);
  if (tensor == nullptr) return kFailed;
  *result = tensor->strides;
  return kDone;
}

MCTL_EXPORT AOTITorchError aoti_torch_get_size(Handle tensor, std::int64_t axis, std::int64_t* result) {
  return tell_axis(tensor, axis, result, &Tensor::sizes);
}

MCTL_EXPORT AOTITorchError aoti_torch_get_stride(Handle tensor, std::int64_t axis, std::int64_t* result) {
  return tell_axis(tensor, axis, result, &Tensor::strides);
}

MCTL_EXPORT AOTITorchError aoti_torch_get_dtype(Handle tensor, std::int32_t* result) {
  return tell(tensor, result, [](const Tensor& t) { return t.dtype; });
}

MCTL_EXPORT AOTITorchError aoti_torch_get_device_type(Handle tensor, std::int32_t* result) {
  return tell(tensor, result, [](const Tensor&) { return aoti_torch_device_type_cpu(); });
}

MCTL_EXPORT AOTITorchError aoti_torch_get_device_index(Handle tensor, std::int32_t* result) {
  return tell(tensor, result, [](const Tensor&) { return -1; });
}

MCTL_EXPORT AOTITorchError aoti_torch_get_layout(Handle tensor, std::int32_t* result) {
  return tell(tensor, result, [](const Tensor&) { return aoti_torch_layout_strided(); });
}

MCTL_EXPORT AOTITorchError aoti_torch_get_storage_offset(Handle tensor, std::int64_t* result) {
  return tell(tensor, result, [](const Tensor& t) { return t.offset; });
}

MCTL_EXPORT AOTITorchError aoti_torch_is_contiguous(Handle tensor, bool* result) {
  return tell(tensor, result, [](const Tensor& t) { return t.is_contiguous(); });
}

MCTL_EXPORT AOTITorchError aoti_torch_is_defined(Handle tensor, bool* result) {
  return tell(tensor, result, [](const Tensor&) { return true; });
}

// --- grad mode: kept, and without a meaning here
// ----------------------------------------------------------------------

namespace {
thread_local bool grad_mode = true;
}

MCTL_EXPORT bool aoti_torch_grad_mode_is_enabled() { return grad_mode; }
MCTL_EXPORT void aoti_torch_grad_mode_set_enabled(bool enabled) { grad_mode = enabled; }

}  // namespace mctl::shim
