// mctl::mctl_conv2d(x [b, c, h, w], packed, bias [n]?, residual?, n, kernel, stride, padding, dilation, groups, act)
//
// Channels lie innermost. Pixels that a chunk of outputs looks at are gathered into rows, and these are multiplied with
// the packed weights, of float32 or bfloat16 as in a linear layer; a 1x1 convolution needs no gathering. Depthwise
// convolutions go channel by channel, in vectors of float32.
#include "linear.h"
#include "tensor.h"

namespace mctl {
namespace {

struct Shape {
  std::int64_t batch, channels, height, width;  // of the input
  std::int64_t out_height, out_width, n;
  std::int64_t kernel[2], stride[2], padding[2], dilation[2];
  std::int64_t groups;

  std::int64_t pixels() const { return batch * out_height * out_width; }
  std::int64_t taps() const { return kernel[0] * kernel[1]; }
  bool depthwise() const { return groups > 1 && groups == channels && groups == n; }
  bool pointwise() const {
    return taps() == 1 && stride[0] == 1 && stride[1] == 1 && padding[0] == 0 && padding[1] == 0;
  }
};

// The input pixel [b, y, x] that a tap looks at, `channels` floats; null in the padding.
const float* pixel(const Shape& s, const float* x, std::int64_t b, std::int64_t row, std::int64_t column) {
  if (row < 0 || row >= s.height || column < 0 || column >= s.width) return nullptr;
  return x + ((b * s.height + row) * s.width + column) * s.channels;
}

// Where output pixel number `p` begins to look.
struct Corner {
  Corner(const Shape& s, std::int64_t p)
      : b(p / (s.out_height * s.out_width)),
        row(p / s.out_width % s.out_height * s.stride[0] - s.padding[0]),
        column(p % s.out_width * s.stride[1] - s.padding[1]) {}
  std::int64_t b, row, column;
};

// The inputs of outputs [begin, end), channels [first, first + count), as rows of taps.
void gather(const Shape& s, const float* x, std::int64_t begin, std::int64_t end, std::int64_t first,
            std::int64_t count, float* to) {
  const auto bytes = static_cast<std::size_t>(count) * sizeof(float);
  const bool beside = s.dilation[1] == 1 && count == s.channels;  // a row of taps lies in one piece
  for (std::int64_t p = begin; p < end; ++p) {
    const Corner at(s, p);
    for (std::int64_t i = 0; i < s.kernel[0]; ++i) {
      const std::int64_t row = at.row + i * s.dilation[0];
      const bool inside = row >= 0 && row < s.height && at.column >= 0 && at.column + s.kernel[1] <= s.width;
      if (beside && inside) {
        std::memcpy(to, pixel(s, x, at.b, row, at.column), bytes * static_cast<std::size_t>(s.kernel[1]));
        to += count * s.kernel[1];
        continue;
      }
      for (std::int64_t j = 0; j < s.kernel[1]; ++j, to += count) {
        const float* const from = pixel(s, x, at.b, row, at.column + j * s.dilation[1]);
        if (from != nullptr)
          std::memcpy(to, from + first, bytes);
        else
          std::fill_n(to, count, 0.0f);
      }
    }
  }
}

// One thread's outputs [pixels.begin, pixels.end).
template <class Element>
void convolve(const Shape& s, const float* x, const Element* packed, Share pixels, const Finish& finish, float* out) {
  const std::int64_t c = s.channels / s.groups, n = s.n / s.groups, k = s.taps() * c;
  const std::int64_t panel = elements<Element>(k) * kPanel, group_size = (n + kPanel - 1) / kPanel * panel;
  const std::int64_t most = std::clamp<std::int64_t>((1 << 15) / std::max<std::int64_t>(k, 1), 12, 96);
  float* const rows = s.pointwise() ? nullptr : scratch<4>(most * k);
  for (std::int64_t begin = pixels.begin; begin < pixels.end; begin += most) {
    const std::int64_t end = std::min(begin + most, pixels.end);
    for (std::int64_t group = 0; group < s.groups; ++group) {
      Rows<const float> from{x + begin * s.channels + group * c, s.channels};
      if (rows != nullptr) {
        gather(s, x, begin, end, group * c, c, rows);
        from = {rows, k};
      }
      Finish mine = finish;
      if (finish.bias != nullptr) mine.bias += group * n;
      if (finish.residual != nullptr) mine.residual += begin * s.n + group * n;
      mine.residual_stride = s.n;
      multiply(end - begin, elements<Element>(k), factors<Element>(end - begin, k, from),
               {packed + group * group_size, n, panel}, 0, n, mine, {out + begin * s.n + group * n, s.n});
    }
  }
}

// Outputs [pixels.begin, pixels.end) of a convolution that keeps channels apart; packed is [taps][n].
void depthwise(const Shape& s, const float* x, const float* packed, Share pixels, const Finish& finish, float* out) {
  for (std::int64_t p = pixels.begin; p < pixels.end; ++p) {
    const Corner at(s, p);
    for (std::int64_t c = 0; c < s.n; c += kLanes) {
      const int count = static_cast<int>(std::min<std::int64_t>(kLanes, s.n - c));
      Floats sum{};
      for (std::int64_t i = 0; i < s.kernel[0]; ++i)
        for (std::int64_t j = 0; j < s.kernel[1]; ++j) {
          const float* const from = pixel(s, x, at.b, at.row + i * s.dilation[0], at.column + j * s.dilation[1]);
          if (from != nullptr) sum += load(from + c, count) * load(packed + (i * s.kernel[1] + j) * s.n + c, count);
        }
      if (finish.bias != nullptr) sum += load(finish.bias + c, count);
      if (finish.residual != nullptr) sum += load(finish.residual + p * s.n + c, count);
      store(out + p * s.n + c, activated(sum, finish.activation), count);
    }
  }
}

bool channels_last(const View& x) {
  const std::int64_t c = x.sizes[1], w = x.sizes[3];
  const std::int64_t wanted[] = {x.sizes[2] * w * c, 1, w * c, c};
  for (int axis = 0; axis < 4; ++axis)
    if (x.sizes[axis] > 1 && x.strides[axis] != wanted[axis]) return false;
  return true;
}

// The tensor with its channels innermost: itself, or a copy.
template <int Use>
const float* innermost(const View& x) {
  if (channels_last(x)) return x.data;
  const std::int64_t c = x.sizes[1], h = x.sizes[2], w = x.sizes[3];
  float* const copy = scratch<Use>(x.sizes[0] * c * h * w);
  for (std::int64_t b = 0; b < x.sizes[0]; ++b)
    for (std::int64_t row = 0; row < h; ++row)
      for (std::int64_t channel = 0; channel < c; ++channel) {
        const float* const from = x.data + b * x.strides[0] + channel * x.strides[1] + row * x.strides[2];
        float* const to = copy + (b * h + row) * w * c + channel;
        for (std::int64_t column = 0; column < w; ++column) to[column * c] = from[column * x.strides[3]];
      }
  return copy;
}

void run(const Shape& s, const float* x, const View& packed, const Finish& finish, float* out) {
  const int threads = threads_for(s.pixels() * s.taps() * (s.channels / s.groups) * s.n);
  in_parallel(threads, [&](int index, int count) {
    const Share mine(s.pixels(), index, count);
    if (s.depthwise())
      depthwise(s, x, packed.data, mine, finish, out);
    else if (packed.is_bfloat16())
      convolve(s, x, packed.as<Pair>(), mine, finish, out);
    else
      convolve(s, x, packed.as<float>(), mine, finish, out);
  });
}

}  // namespace
}  // namespace mctl

MCTL_ENTRY std::int32_t aoti_torch_cpu_mctl_conv2d(AtenTensorHandle input, AtenTensorHandle weight,
                                                   AtenTensorHandle* bias, AtenTensorHandle* residual, std::int64_t n,
                                                   const std::int64_t* kernel, std::int64_t kernel_len,
                                                   const std::int64_t* stride, std::int64_t stride_len,
                                                   const std::int64_t* padding, std::int64_t padding_len,
                                                   const std::int64_t* dilation, std::int64_t dilation_len,
                                                   std::int64_t groups, std::int64_t act, AtenTensorHandle* out) {
  using namespace mctl;
  return guarded([&] {
    const View x(input), packed(weight);
    x.require_float(4);
    require(kernel_len == 2 && stride_len == 2 && padding_len == 2 && dilation_len == 2 && groups >= 1 && n >= 1);
    Shape s{x.sizes[0], x.sizes[1], x.sizes[2], x.sizes[3], 0, 0, n, {}, {}, {}, {}, groups};
    for (int axis : {0, 1}) {
      s.kernel[axis] = kernel[axis];
      s.stride[axis] = stride[axis];
      s.padding[axis] = padding[axis];
      s.dilation[axis] = dilation[axis];
      require(kernel[axis] >= 1 && stride[axis] >= 1 && padding[axis] >= 0 && dilation[axis] >= 1);
      const std::int64_t reach = x.sizes[2 + axis] + 2 * padding[axis] - dilation[axis] * (kernel[axis] - 1) - 1;
      require(reach >= 0);
      (axis == 0 ? s.out_height : s.out_width) = reach / stride[axis] + 1;
    }
    require(s.channels % groups == 0 && n % groups == 0);
    const std::int64_t k = s.taps() * (s.channels / groups), panels = (n / groups + kPanel - 1) / kPanel;
    if (s.depthwise())
      packed.require_float({1, 1, s.taps(), n});
    else if (packed.is_bfloat16())
      packed.require_pairs({groups, panels, elements<Pair>(k), kPanel, 2});
    else
      packed.require_float({groups, panels, k, kPanel});
    const std::int64_t sizes[] = {s.batch, n, s.out_height, s.out_width};
    const std::int64_t strides[] = {s.out_height * s.out_width * n, 1, s.out_width * n, n};
    Finish finish;
    finish.activation = static_cast<Activation>(act);
    finish.bias = bias_of(bias, n);
    if (residual != nullptr) {
      const View r(*residual);
      r.require_float(4);
      require(std::equal(sizes, sizes + 4, r.sizes));
      finish.residual = innermost<5>(r);
    }
    const View y = empty(4, sizes, strides, out);
    if (s.pixels() > 0) run(s, innermost<6>(x), packed, finish, y.data);
  });
}
