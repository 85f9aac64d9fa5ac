// Times mctl's kernels from C++, so that a call costs what it costs a variant; every output goes to the same memory.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <vector>

struct AtenTensorOpaque {
  void* data;
  std::vector<std::int64_t> sizes, strides;
  std::int32_t dtype = 6;
};

namespace {

using Tensor = AtenTensorOpaque*;

AtenTensorOpaque output;
std::vector<float> memory;

template <class Call>
double seconds(int calls, const Call& call) {
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < calls; ++i)
    if (call() != 0) return -1;
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / calls;
}

#ifdef __AVX512F__
constexpr int kLanes = 16, kSums = 24;
#elif defined(__AVX__)
constexpr int kLanes = 8, kSums = 12;
#else
constexpr int kLanes = 4, kSums = 12;
#endif
using Floats = float __attribute__((vector_size(kLanes * 4)));

}  // namespace

extern "C" {

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
std::int32_t aoti_torch_device_type_cpu() { return 0; }

std::int32_t aoti_torch_empty_strided(std::int64_t rank, const std::int64_t* sizes, const std::int64_t* strides,
                                      std::int32_t, std::int32_t, std::int32_t, Tensor* out) {
  std::size_t count = 1;
  for (std::int64_t axis = 0; axis < rank; ++axis) count *= static_cast<std::size_t>(sizes[axis]);
  if (memory.size() < count) memory.resize(count);
  output.data = memory.data();
  output.sizes.assign(sizes, sizes + rank);
  output.strides.assign(strides, strides + rank);
  return *out = &output, 0;
}

std::int32_t aoti_torch_cpu_mctl_linear(Tensor, Tensor, Tensor*, Tensor*, std::int64_t, std::int64_t, Tensor*);
std::int32_t aoti_torch_cpu_mctl_conv2d(Tensor, Tensor, Tensor*, Tensor*, std::int64_t, const std::int64_t*,
                                        std::int64_t, const std::int64_t*, std::int64_t, const std::int64_t*,
                                        std::int64_t, const std::int64_t*, std::int64_t, std::int64_t, std::int64_t,
                                        Tensor*);
std::int32_t aoti_torch_cpu_mctl_attention(Tensor, Tensor, Tensor, Tensor*, double, std::int32_t, Tensor*);

Tensor bench_tensor(void* data, std::int64_t rank, const std::int64_t* sizes, const std::int64_t* strides,
                    std::int32_t dtype) {
  return new AtenTensorOpaque{data, {sizes, sizes + rank}, {strides, strides + rank}, dtype};
}

// Seconds a call; -1 if the kernel refuses.
double bench_linear(int calls, Tensor x, Tensor packed, Tensor bias, std::int64_t n, std::int64_t act) {
  Tensor out;
  return seconds(calls, [&] { return aoti_torch_cpu_mctl_linear(x, packed, &bias, nullptr, n, act, &out); });
}

// A square kernel, its stride and its padding.
double bench_conv2d(int calls, Tensor x, Tensor packed, Tensor bias, std::int64_t n, std::int64_t kernel,
                    std::int64_t stride, std::int64_t padding, std::int64_t groups, std::int64_t act) {
  Tensor out;
  const std::int64_t sizes[] = {kernel, kernel}, steps[] = {stride, stride}, around[] = {padding, padding},
                     apart[] = {1, 1};
  return seconds(calls, [&] {
    return aoti_torch_cpu_mctl_conv2d(x, packed, &bias, nullptr, n, sizes, 2, steps, 2, around, 2, apart, 2, groups,
                                      act, &out);
  });
}

double bench_attention(int calls, Tensor q, Tensor k, Tensor v, double scale) {
  Tensor out;
  return seconds(calls, [&] { return aoti_torch_cpu_mctl_attention(q, k, v, nullptr, scale, 0, &out); });
}

// Multiply-adds a second of one thread that keeps all in registers.
double bench_peak() {
  constexpr int kSteps = 100'000;
  Floats sums[kSums] = {};
  Floats factor = Floats{} + 0.999f;
  for (Floats& sum : sums) asm volatile("" : "+x"(sum));  // equal sums would be made once
  const double took = seconds(1, [&] {
    for (int step = 0; step < kSteps; ++step) {
      asm volatile("" : "+x"(factor));
#pragma GCC unroll 24  // g++ keeps the sums in memory otherwise
      for (int i = 0; i < kSums; ++i) sums[i] = sums[i] * factor + factor;
    }
    return 0;
  });
  for (Floats& sum : sums) asm volatile("" : "+x"(sum));
  return static_cast<double>(kSteps) * kSums * kLanes / took;
}
}
