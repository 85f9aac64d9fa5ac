// Average pooling over two axes whose windows are too large to be compiled.
#include "product.h"

namespace mctl::shim {
namespace {

// Along one axis: what an output's place averages over, within the input, and what it counts as.
struct Window {
  std::int64_t begin, end, counted;
};

// `window(axis, place)` gives the windows of the two axes.
template <class Windows>
AOTITorchError average(const char* name, const Tensor& x, const std::int64_t* places, const std::int64_t* divisor,
                       Handle* result, Windows window) {
  std::int64_t sizes[4];
  std::copy(x.sizes, x.sizes + x.rank, sizes);
  const std::int32_t lead = x.rank - 2;
  sizes[lead] = places[0];
  sizes[lead + 1] = places[1];
  AOTITorchError done = kFailed;
  const bool known = with_float_type(x.dtype, [&]<class E>(E*) {
    using T = Sum<E>;
    Handle made = nullptr;
    if (make_image(x.rank, sizes, x.dtype, channels_last(x), &made) != kDone) return;
    const Tensor& out = *find(made);
    const std::int64_t channels = x.sizes[lead - 1], images = x.rank == 4 ? x.sizes[0] : 1;
    const int threads = threads_for(static_cast<double>(x.count) * 4);
    share_out(threads, images * channels, [&](std::int64_t plane, int) {
      const auto begin = [&](const Tensor& of) {
        return elements<E>(of) + plane % channels * of.strides[lead - 1] +
               (x.rank == 4 ? plane / channels * of.strides[0] : 0);
      };
      const E* const from = begin(x);
      E* const to = begin(out);
      for (std::int64_t i = 0; i < places[0]; ++i)
        for (std::int64_t j = 0; j < places[1]; ++j) {
          const Window down = window(0, i), across = window(1, j);
          T sum = 0;
          for (std::int64_t y = down.begin; y < down.end; ++y)
            for (std::int64_t z = across.begin; z < across.end; ++z)
              sum += cast<T>(from[y * x.strides[lead] + z * x.strides[lead + 1]]);
          const std::int64_t count = divisor != nullptr ? *divisor : down.counted * across.counted;
          to[i * out.strides[lead] + j * out.strides[lead + 1]] = cast<E>(sum / static_cast<T>(count));
        }
    });
    *result = made;
    done = kDone;
  });
  return known ? done : refuse_dtype(name, x.dtype);
}

const Tensor* image(const char* name, Handle handle) {
  const Tensor* x = find(handle);
  if (x == nullptr) return nullptr;
  if (x->rank == 3 || x->rank == 4) return x;
  fail("`%s` of a tensor of %d axes", name, x->rank);
  return nullptr;
}

AOTITorchError outside(const char* what, std::int64_t number) {
  return fail("`avg_pool2d` with the %s %lld", what, static_cast<long long>(number));
}

}  // namespace

MCTL_EXPORT AOTITorchError aoti_torch_cpu__adaptive_avg_pool2d(Handle handle, const std::int64_t* sizes,
                                                               std::int64_t count, Handle* result) {
  const Tensor* x = image("_adaptive_avg_pool2d", handle);
  if (x == nullptr) return kFailed;
  if (count != 2 || sizes[0] < 0 || sizes[1] < 0 || x->sizes[x->rank - 1] < 1 || x->sizes[x->rank - 2] < 1)
    return fail("`_adaptive_avg_pool2d` of sizes that cannot be");
  return average("_adaptive_avg_pool2d", *x, sizes, nullptr, result, [&](int axis, std::int64_t at) {
    const std::int64_t in = x->sizes[x->rank - 2 + axis], out = sizes[axis];
    const std::int64_t begin = at * in / out, end = ((at + 1) * in + out - 1) / out;
    return Window{begin, end, end - begin};
  });
}

MCTL_EXPORT AOTITorchError aoti_torch_cpu_avg_pool2d(Handle handle, const std::int64_t* kernel, std::int64_t kernels,
                                                     const std::int64_t* stride, std::int64_t strides,
                                                     const std::int64_t* padding, std::int64_t paddings,
                                                     std::int32_t ceil_mode, std::int32_t count_include_pad,
                                                     const std::int64_t* divisor, Handle* result) {
  const Tensor* x = image("avg_pool2d", handle);
  if (x == nullptr) return kFailed;
  std::int64_t window[2], step[2], pad[2], places[2];
  for (int axis = 0; axis < 2; ++axis) {
    constexpr std::int64_t kMost = std::int64_t{1} << 30;
    const std::int64_t in = x->sizes[x->rank - 2 + axis];
    window[axis] = kernels > 0 ? kernel[kernels > 1 ? axis : 0] : 0;
    step[axis] = strides > 0 ? stride[strides > 1 ? axis : 0] : window[axis];
    pad[axis] = paddings > 0 ? padding[paddings > 1 ? axis : 0] : 0;
    if (window[axis] < 1 || window[axis] > kMost) return outside("kernel size", window[axis]);
    if (step[axis] < 1 || step[axis] > kMost) return outside("stride", step[axis]);
    if (pad[axis] < 0 || pad[axis] > window[axis] / 2) return outside("padding", pad[axis]);
    if (in < 1 || in > kMost) return outside("size", in);
    const std::int64_t room = in + 2 * pad[axis] - window[axis] + (ceil_mode != 0 ? step[axis] - 1 : 0);
    places[axis] = room < 0 ? 0 : room / step[axis] + 1;
    if (ceil_mode != 0 && (places[axis] - 1) * step[axis] >= in + pad[axis]) --places[axis];
    if (places[axis] < 1) return fail("`avg_pool2d` whose output would be of the size %lld", 0LL);
  }
  if (divisor != nullptr && *divisor == 0) return outside("divisor", 0);
  return average("avg_pool2d", *x, places, divisor, result, [&](int axis, std::int64_t at) {
    const std::int64_t in = x->sizes[x->rank - 2 + axis], begin = at * step[axis] - pad[axis];
    const std::int64_t end = std::min(begin + window[axis], in + pad[axis]);
    const std::int64_t first = std::max<std::int64_t>(begin, 0), last = std::min(end, in);
    return Window{first, last, count_include_pad != 0 ? end - begin : last - first};
  });
}

}  // namespace mctl::shim
