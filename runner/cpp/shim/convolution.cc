// Convolutions of 1 to 3 axes, transposed ones too: weights times panels of what each place of the output looks at.
#include "product.h"

namespace mctl::shim {
namespace {

constexpr auto kName = "convolution";

struct Geometry {
  std::int32_t rank;  // spatial axes
  bool transposed;
  std::int64_t groups, inputs, outputs;  // channels of a group
  std::int64_t kernel[3], stride[3], padding[3], dilation[3], in[3], out[3];

  std::int64_t taps() const { return kernel[0] * kernel[1] * kernel[2]; }
  std::int64_t terms() const { return inputs * taps(); }
  std::int64_t places() const { return out[0] * out[1] * out[2]; }

  // The place along an axis of the input that place `at` of the output looks at through `tap`; negative: none.
  std::int64_t source(std::int32_t axis, std::int64_t at, std::int64_t tap) const {
    const std::int64_t moved = tap * dilation[axis] - padding[axis];
    std::int64_t from = at * stride[axis] + moved;
    if (transposed) {
      from = at - moved;
      if (from % stride[axis] != 0) return -1;
      from /= stride[axis];
    }
    return from < in[axis] ? from : -1;
  }
};

template <class E>
class Convolution {
 public:
  using T = Sum<E>;

  Convolution(const Geometry& geometry, const Tensor& input, const Tensor& weight, const Tensor* bias,
              const Tensor& output)
      : g_(geometry), input_(input), weight_(weight), bias_(bias), output_(output), tiles_(tiles_for<T>()) {
    spread(input, input_strides_);
    spread(weight, weight_strides_);
    spread(output, output_strides_);
  }

  AOTITorchError run() const {
    const std::int64_t images = input_.sizes[0], panels = (g_.places() + tiles_.columns - 1) / tiles_.columns;
    if (output_.count == 0) return kDone;
    const int threads = threads_for(static_cast<double>(output_.count) * static_cast<double>(g_.terms()) / 2);
    std::int64_t each = 0;
    const bool fits = !__builtin_mul_overflow(g_.terms(), std::int64_t{tiles_.columns}, &each) &&
                      !__builtin_add_overflow(each, g_.outputs * tiles_.columns, &each);
    const Scratch scratch(fits ? each : -1, threads * std::int64_t{sizeof(T)});
    const Scratch weights(g_.groups * g_.outputs * g_.terms(), sizeof(T));
    if (!scratch || !weights) return kFailed;
    pack_weights(weights.at<T>());
    share_out(threads, images * g_.groups * panels, [&](std::int64_t job, int thread) {
      T* const panel = scratch.at<T>(each * thread);
      T* const sums = panel + g_.terms() * tiles_.columns;
      const std::int64_t image = job / panels / g_.groups, group = job / panels % g_.groups;
      const std::int64_t first = job % panels * tiles_.columns;
      const std::int64_t count = std::min<std::int64_t>(tiles_.columns, g_.places() - first);
      gather(image, group, first, count, panel);
      multiply_panel(tiles_, g_.outputs, g_.terms(), weights.at<T>(group * g_.outputs * g_.terms()), g_.terms(), panel,
                     tiles_.columns, sums, tiles_.columns);
      store(image, group, first, count, sums);
    });
    return kDone;
  }

 private:
  // Strides of batch, channel and three spatial axes, of which the first may not be there.
  void spread(const Tensor& tensor, std::int64_t* strides) const {
    strides[0] = tensor.strides[0];
    strides[1] = tensor.strides[1];
    for (int axis = 0; axis < 3; ++axis) {
      const std::int32_t at = axis - (3 - g_.rank);
      strides[2 + axis] = at < 0 ? 0 : tensor.strides[2 + at];
    }
  }

  // [group][output][input][tap]. Those of a transposed convolution begin with the input's channels.
  void pack_weights(T* to) const {
    const E* const from = elements<E>(weight_);
    for (std::int64_t output = 0; output < g_.groups * g_.outputs; ++output)
      for (std::int64_t input = 0; input < g_.inputs; ++input) {
        const std::int64_t group = output / g_.outputs;
        const E* const at = g_.transposed ? from + (group * g_.inputs + input) * weight_strides_[0] +
                                                output % g_.outputs * weight_strides_[1]
                                          : from + output * weight_strides_[0] + input * weight_strides_[1];
        for (std::int64_t z = 0; z < g_.kernel[0]; ++z)
          for (std::int64_t y = 0; y < g_.kernel[1]; ++y)
            for (std::int64_t x = 0; x < g_.kernel[2]; ++x)
              *to++ = cast<T>(at[z * weight_strides_[2] + y * weight_strides_[3] + x * weight_strides_[4]]);
      }
  }

  // The panel of `count` places: for each input channel and tap, what each place looks at.
  void gather(std::int64_t image, std::int64_t group, std::int64_t first, std::int64_t count, T* panel) const {
    const E* const from = elements<E>(input_) + image * input_strides_[0] + group * g_.inputs * input_strides_[1];
    std::fill(panel, panel + g_.terms() * tiles_.columns, T(0));
    for (std::int64_t z = 0, tap = 0; z < g_.kernel[0]; ++z)
      for (std::int64_t y = 0; y < g_.kernel[1]; ++y)
        for (std::int64_t x = 0; x < g_.kernel[2]; ++x, ++tap)
          for (std::int64_t i = 0, run = 0; i < count; i += run) {
            const std::int64_t place = first + i, area = g_.out[1] * g_.out[2], at_x = place % g_.out[2];
            // what places in a row look at lies in a row too, but of transposed convolutions
            run = g_.transposed ? 1 : std::min(count - i, g_.out[2] - at_x);
            const std::int64_t in_z = g_.source(0, place / area, z), in_y = g_.source(1, place % area / g_.out[2], y);
            std::int64_t begin = 0, end = in_z < 0 || in_y < 0 ? 0 : run;
            while (begin < end && g_.source(2, at_x + begin, x) < 0) ++begin;
            while (begin < end && g_.source(2, at_x + end - 1, x) < 0) --end;
            if (begin >= end) continue;
            const E* at = from + in_z * input_strides_[2] + in_y * input_strides_[3] +
                          g_.source(2, at_x + begin, x) * input_strides_[4];
            T* to = panel + tap * tiles_.columns + i + begin;
            for (std::int64_t input = 0; input < g_.inputs; ++input) {
              pack_row(at, g_.stride[2] * input_strides_[4], end - begin, to);
              at += input_strides_[1];
              to += g_.taps() * tiles_.columns;
            }
          }
  }

  void store(std::int64_t image, std::int64_t group, std::int64_t first, std::int64_t count, const T* sums) const {
    const std::int64_t area = g_.out[1] * g_.out[2];
    std::int64_t places[kMostColumns];
    for (std::int64_t i = 0; i < count; ++i)
      places[i] = (first + i) / area * output_strides_[2] + (first + i) % area / g_.out[2] * output_strides_[3] +
                  (first + i) % g_.out[2] * output_strides_[4];
    for (std::int64_t output = 0; output < g_.outputs; ++output, sums += tiles_.columns) {
      const std::int64_t channel = group * g_.outputs + output;
      const T bias = bias_ == nullptr ? T(0) : cast<T>(elements<E>(*bias_)[channel * bias_->strides[0]]);
      E* const to = elements<E>(output_) + image * output_strides_[0] + channel * output_strides_[1];
      for (std::int64_t i = 0; i < count; ++i) to[places[i]] = cast<E>(sums[i] + bias);
    }
  }

  const Geometry& g_;
  const Tensor &input_, &weight_;
  const Tensor* bias_;
  const Tensor& output_;
  const Tiles<T>& tiles_;
  std::int64_t input_strides_[5], weight_strides_[5], output_strides_[5];
};

struct Given {
  const std::int64_t *stride, *padding, *dilation, *output_padding;
  std::int64_t strides, paddings, dilations, output_paddings;
};

AOTITorchError outside(const char* what, std::int64_t number) {
  return fail("`%s` with the %s %lld", kName, what, static_cast<long long>(number));
}

// Checks everything; the numbers are small enough for their products with one another.
AOTITorchError describe(const Tensor& input, const Tensor& weight, const Tensor* bias, const Given& given,
                        bool transposed, std::int64_t groups, Geometry& g) {
  if (input.rank < 3 || input.rank > 5 || weight.rank != input.rank)
    return fail("`%s` of tensors of %d and %d axes", kName, input.rank, weight.rank);
  if (same_dtype(kName, input, weight) != kDone) return kFailed;
  g.rank = input.rank - 2;
  g.transposed = transposed;
  g.groups = groups;
  const std::int64_t lead = weight.sizes[0];
  if (groups < 1 || input.sizes[1] % groups != 0 || lead % groups != 0) return outside("number of groups", groups);
  g.inputs = input.sizes[1] / groups;
  g.outputs = transposed ? weight.sizes[1] : lead / groups;
  if ((transposed ? lead / groups : weight.sizes[1]) != g.inputs) return outside("number of channels", input.sizes[1]);
  if (bias != nullptr) {
    if (same_dtype(kName, input, *bias) != kDone) return kFailed;
    if (bias->rank != 1 || bias->sizes[0] != groups * g.outputs) return outside("size of the bias", bias->count);
  }
  for (int axis = 0; axis < 3; ++axis) {
    const std::int32_t at = axis - (3 - g.rank);
    const auto number = [&](const std::int64_t* list, std::int64_t count, std::int64_t otherwise) {
      return at < 0 ? otherwise : count == 1 ? list[0] : count == g.rank ? list[at] : -1;
    };
    g.in[axis] = at < 0 ? 1 : input.sizes[2 + at];
    g.kernel[axis] = at < 0 ? 1 : weight.sizes[2 + at];
    g.stride[axis] = number(given.stride, given.strides, 1);
    g.padding[axis] = number(given.padding, given.paddings, 0);
    g.dilation[axis] = number(given.dilation, given.dilations, 1);
    const std::int64_t extra = transposed ? number(given.output_padding, given.output_paddings, 0) : 0;
    constexpr std::int64_t kMost = std::int64_t{1} << 30;
    if (g.stride[axis] < 1 || g.stride[axis] > kMost) return outside("stride", g.stride[axis]);
    if (g.padding[axis] < 0 || g.padding[axis] > kMost) return outside("padding", g.padding[axis]);
    if (g.dilation[axis] < 1 || g.dilation[axis] > kMost) return outside("dilation", g.dilation[axis]);
    if (extra < 0 || extra > kMost) return outside("output padding", extra);
    if (g.kernel[axis] < 1 || g.kernel[axis] > kMost) return outside("kernel size", g.kernel[axis]);
    if (g.in[axis] > kMost) return outside("size", g.in[axis]);
    const std::int64_t reach = g.dilation[axis] * (g.kernel[axis] - 1), around = 2 * g.padding[axis] - reach;
    g.out[axis] = transposed ? (g.in[axis] - 1) * g.stride[axis] - around + extra + 1
                             : (g.in[axis] + around - 1 >= 0 ? (g.in[axis] + around - 1) / g.stride[axis] + 1 : 0);
    if (g.out[axis] < 1)
      return fail("`%s` whose output would be of the size %lld", kName, static_cast<long long>(g.out[axis]));
  }
  return kDone;
}

// In float64 torch has another way for three axes, which does not look at the memory format.
AOTITorchError make_output(const Geometry& g, const Tensor& input, const Tensor& weight, Handle* result) {
  std::int64_t sizes[5] = {input.sizes[0], g.groups * g.outputs};
  for (std::int32_t axis = 0; axis < g.rank; ++axis) sizes[2 + axis] = g.out[3 - g.rank + axis];
  const bool last = (g.rank == 2 || input.dtype != 7) && (channels_last(input) || channels_last(weight));
  return make_image(input.rank, sizes, input.dtype, last, result);
}

}  // namespace

MCTL_EXPORT AOTITorchError aoti_torch_cpu_convolution(Handle input_handle, Handle weight_handle, Handle* bias_handle,
                                                      const std::int64_t* stride, std::int64_t strides,
                                                      const std::int64_t* padding, std::int64_t paddings,
                                                      const std::int64_t* dilation, std::int64_t dilations,
                                                      std::int32_t transposed, const std::int64_t* output_padding,
                                                      std::int64_t output_paddings, std::int64_t groups,
                                                      Handle* result) {
  const Tensor *input = find(input_handle), *weight = find(weight_handle);
  const Tensor* bias = bias_handle != nullptr ? find(*bias_handle) : nullptr;
  if (input == nullptr || weight == nullptr || (bias_handle != nullptr && bias == nullptr)) return kFailed;
  const Given given{stride, padding, dilation, output_padding, strides, paddings, dilations, output_paddings};
  Geometry geometry{};
  if (describe(*input, *weight, bias, given, transposed != 0, groups, geometry) != kDone) return kFailed;
  AOTITorchError done = kFailed;
  const bool known = with_float_type(input->dtype, [&]<class E>(E*) {
    Handle made = nullptr;
    if (make_output(geometry, *input, *weight, &made) != kDone) return;
    done = Convolution<E>(geometry, *input, *weight, bias, *find(made)).run();
    if (done == kDone)
      *result = made;
    else
      remove(made);
  });
  return known ? done : refuse_dtype(kName, input->dtype);
}

}  // namespace mctl::shim
