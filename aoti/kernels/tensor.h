// The little of AOTInductor's C interface that the kernels need: torch/csrc/inductor/aoti_torch/c/shim.h.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <stdexcept>

struct AtenTensorOpaque;

extern "C" {
using AtenTensorHandle = AtenTensorOpaque*;

std::int32_t aoti_torch_get_data_ptr(AtenTensorHandle, void**);
std::int32_t aoti_torch_get_dim(AtenTensorHandle, std::int64_t*);
std::int32_t aoti_torch_get_sizes(AtenTensorHandle, std::int64_t**);
std::int32_t aoti_torch_get_strides(AtenTensorHandle, std::int64_t**);
std::int32_t aoti_torch_get_dtype(AtenTensorHandle, std::int32_t*);
std::int32_t aoti_torch_empty_strided(std::int64_t rank, const std::int64_t* sizes, const std::int64_t* strides,
                                      std::int32_t dtype, std::int32_t device, std::int32_t device_index,
                                      AtenTensorHandle*);
std::int32_t aoti_torch_dtype_float32();
std::int32_t aoti_torch_dtype_bfloat16();
std::int32_t aoti_torch_dtype_bool();
std::int32_t aoti_torch_dtype_int64();
std::int32_t aoti_torch_device_type_cpu();
}

namespace mctl {

inline void require(bool holds) {
  if (!holds) throw std::invalid_argument("not what the kernel was compiled for");
}

// A tensor that the caller owns.
struct View {
  explicit View(AtenTensorHandle tensor) {
    void* at = nullptr;
    require(aoti_torch_get_data_ptr(tensor, &at) == 0 && aoti_torch_get_dim(tensor, &rank) == 0 &&
            aoti_torch_get_sizes(tensor, &sizes) == 0 && aoti_torch_get_strides(tensor, &strides) == 0 &&
            aoti_torch_get_dtype(tensor, &dtype) == 0);
    data = static_cast<float*>(at);
  }

  void require_float(std::int64_t of_rank) const { require(rank == of_rank && dtype == aoti_torch_dtype_float32()); }

  void require_float(std::initializer_list<std::int64_t> of_sizes) const {
    require_float(static_cast<std::int64_t>(of_sizes.size()));
    require(std::equal(of_sizes.begin(), of_sizes.end(), sizes));
  }

  void require_pairs(std::initializer_list<std::int64_t> of_sizes) const {
    require(is_bfloat16() && rank == static_cast<std::int64_t>(of_sizes.size()));
    require(std::equal(of_sizes.begin(), of_sizes.end(), sizes));
  }

  bool is_bfloat16() const { return dtype == aoti_torch_dtype_bfloat16(); }

  template <class Element>
  const Element* as() const {
    return reinterpret_cast<const Element*>(data);
  }

  float* data = nullptr;
  std::int64_t rank = 0;
  std::int64_t* sizes = nullptr;
  std::int64_t* strides = nullptr;
  std::int32_t dtype = 0;
};

// A bias of `n` floats; null where there is none.
inline const float* bias_of(AtenTensorHandle* bias, std::int64_t n) {
  if (bias == nullptr) return nullptr;
  const View b(*bias);
  b.require_float(1);
  require(b.sizes[0] == n && (n == 1 || b.strides[0] == 1));
  return b.data;
}

inline View empty(std::int64_t rank, const std::int64_t* sizes, const std::int64_t* strides, AtenTensorHandle* out) {
  require(aoti_torch_empty_strided(rank, sizes, strides, aoti_torch_dtype_float32(), aoti_torch_device_type_cpu(), 0,
                                   out) == 0);
  return View(*out);
}

// What `kernel` throws is a failure for the caller, who knows no exceptions.
template <class Kernel>
std::int32_t guarded(const Kernel& kernel) noexcept {
  try {
    kernel();
    return 0;
  } catch (...) {
    return 1;
  }
}

}  // namespace mctl

#define MCTL_ENTRY extern "C" __attribute__((visibility("default")))
