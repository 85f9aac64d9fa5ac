// AOTInductor's C interface as far as the kernels call it, over tensors that a test makes. Memory of outputs starts as
// NaN and ends with a fence, so that what is not written, or written beyond, is seen.
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <vector>

struct AtenTensorOpaque {
  void* data;
  std::vector<std::int64_t> sizes, strides;
  std::int32_t dtype;
  std::vector<float> own;
};

namespace {
constexpr float kFence = 12345.0f;
bool refuse = false;  // the next output
}  // namespace

extern "C" {
using Tensor = AtenTensorOpaque*;

Tensor host_tensor(void* data, std::int64_t rank, const std::int64_t* sizes, const std::int64_t* strides,
                   std::int32_t dtype) {
  return new AtenTensorOpaque{data, {sizes, sizes + rank}, {strides, strides + rank}, dtype, {}};
}

void host_delete(Tensor tensor) { delete tensor; }
bool host_fence_holds(Tensor tensor) { return tensor->own.back() == kFence; }
void host_refuse(bool next) { refuse = next; }

std::int32_t aoti_torch_get_data_ptr(Tensor t, void** out) { return *out = t->data, 0; }
std::int32_t aoti_torch_get_dim(Tensor t, std::int64_t* out) {
  return *out = static_cast<std::int64_t>(t->sizes.size()), 0;
}
std::int32_t aoti_torch_get_sizes(Tensor t, std::int64_t** out) { return *out = t->sizes.data(), 0; }
std::int32_t aoti_torch_get_strides(Tensor t, std::int64_t** out) { return *out = t->strides.data(), 0; }
std::int32_t aoti_torch_get_dtype(Tensor t, std::int32_t* out) { return *out = t->dtype, 0; }
std::int32_t aoti_torch_dtype_float32() { return 6; }
std::int32_t aoti_torch_dtype_bfloat16() { return 15; }
std::int32_t aoti_torch_dtype_bool() { return 11; }
std::int32_t aoti_torch_dtype_int64() { return 4; }
std::int32_t aoti_torch_device_type_cpu() { return 0; }

std::int32_t aoti_torch_empty_strided(std::int64_t rank, const std::int64_t* sizes, const std::int64_t* strides,
                                      std::int32_t dtype, std::int32_t, std::int32_t, Tensor* out) {
  if (refuse) return 1;
  std::size_t count = 1;
  for (std::int64_t axis = 0; axis < rank; ++axis) count *= static_cast<std::size_t>(sizes[axis]);
  *out = host_tensor(nullptr, rank, sizes, strides, dtype);
  (*out)->own.assign(count + 1, NAN);
  (*out)->own.back() = kFence;
  (*out)->data = (*out)->own.data();
  return 0;
}
}
