// Tensors of one element and their numbers, and what fills or looks at every element.
#include <cmath>
#include <cstring>

#include "tensor.h"

namespace mctl::shim {
namespace {

template <class T>
AOTITorchError item_as(Handle handle, T* result) {
  const Tensor* tensor = find(handle);
  if (tensor == nullptr) return kFailed;
  if (tensor->count != 1)
    return fail("the number of a tensor with %lld elements", static_cast<long long>(tensor->count));
  const bool known = with_type(
      tensor->dtype, [&]<class From>(From*) { *result = cast<T>(*reinterpret_cast<const From*>(tensor->data())); });
  return known ? kDone : fail("dtype %d has no plain number", tensor->dtype);
}

// A tensor of no axes.
template <class T>
AOTITorchError tensor_of(T value, std::int32_t dtype, Handle* result) {
  if (make_empty(0, nullptr, nullptr, dtype, result) != kDone) return kFailed;
  std::memcpy(find(*result)->data(), &value, sizeof value);
  return kDone;
}

// A tensor of one element, broadcast to `to`.
AOTITorchError fill(Handle self, double value) {
  const Tensor* to = find(self);
  if (to == nullptr) return kFailed;
  Tensor number;
  number.storage = reinterpret_cast<std::byte*>(&value);
  number.storage_bytes = sizeof value;
  number.count = 1;
  number.dtype = 7;
  return copy(*to, number);
}

template <class T>
bool all_finite(const Tensor& tensor, const T* data, std::int32_t axis) {
  if (axis == tensor.rank) return std::isfinite(cast<double>(*data));
  for (std::int64_t i = 0; i < tensor.sizes[axis]; ++i)
    if (!all_finite(tensor, data + i * tensor.strides[axis], axis + 1)) return false;
  return true;
}

}  // namespace

#define MCTL_SCALAR(name, type, number)                                                                              \
  MCTL_EXPORT AOTITorchError aoti_torch_item_##name(Handle tensor, type* result) { return item_as(tensor, result); } \
  MCTL_EXPORT AOTITorchError aoti_torch_scalar_to_tensor_##name(type value, Handle* result) {                        \
    return tensor_of(value, number, result);                                                                         \
  }
MCTL_SCALAR(uint8, std::uint8_t, 0)
MCTL_SCALAR(int8, std::int8_t, 1)
MCTL_SCALAR(int16, std::int16_t, 2)
MCTL_SCALAR(int32, std::int32_t, 3)
MCTL_SCALAR(int64, std::int64_t, 4)
MCTL_SCALAR(float32, float, 6)
MCTL_SCALAR(float64, double, 7)
MCTL_SCALAR(bool, bool, 11)
MCTL_SCALAR(uint16, std::uint16_t, 27)
MCTL_SCALAR(uint32, std::uint32_t, 28)
MCTL_SCALAR(uint64, std::uint64_t, 29)
#undef MCTL_SCALAR

MCTL_EXPORT AOTITorchError aoti_torch_item_float16(Handle tensor, Float16* result) { return item_as(tensor, result); }
MCTL_EXPORT AOTITorchError aoti_torch_item_bfloat16(Handle tensor, Bfloat16* result) { return item_as(tensor, result); }

MCTL_EXPORT AOTITorchError aoti_torch_zero_(Handle self) { return fill(self, 0); }
MCTL_EXPORT AOTITorchError aoti_torch_cpu_fill__Scalar(Handle self, double value) { return fill(self, value); }
MCTL_EXPORT AOTITorchError aoti_torch_aten_fill__Scalar(Handle self, double value) { return fill(self, value); }

MCTL_EXPORT AOTITorchError aoti_torch_check_inf_and_nan(const char* name, Handle handle) {
  const Tensor* tensor = find(handle);
  if (tensor == nullptr) return kFailed;
  bool finite = true;
  with_type(tensor->dtype,
            [&]<class T>(T*) { finite = all_finite(*tensor, reinterpret_cast<const T*>(tensor->data()), 0); });
  return finite ? kDone : fail("tensor %s has an infinity or NaN", name);
}

// Of the debug printer, which nobody reads here.
MCTL_EXPORT void aoti_torch_print_tensor_handle(Handle, const char*) {}
MCTL_EXPORT void aoti_torch_save_tensor_handle(Handle, const char*, const char*, const char*) {}

}  // namespace mctl::shim
