// mctl::mctl_conv2d(x [b, c, h, w], packed, bias [n]?, residual?, n, kernel, stride, padding, dilation, groups, act)
//
// Channels lie innermost. Each output is a sum over its taps where they lie in the input, or in a copy of a part of it
// that has zeros as padding (and is rounded, where weights are of bfloat16): pixels of a line are the rows of a product
// with the packed weights, their taps its terms. A 1x1 convolution is a linear layer. Depthwise convolutions go by
// vectors of channels, in float32, and leave out taps in the padding.
#include "linear.h"
#include "tensor.h"

namespace mctl {
namespace {

// Convolutions that keep so many channels apart, or more, have a way of their own: it takes whole vectors.
constexpr std::int64_t kLeast = 16;

// Lines of so few outputs, or fewer, take all columns of the weights at once: a product of few rows wants many.
constexpr std::int64_t kNarrow = 6;

struct Shape {
  std::int64_t batch, channels, height, width;  // of the input
  std::int64_t out_height, out_width, n;
  std::int64_t kernel[2], stride[2], padding[2], dilation[2];
  std::int64_t groups;

  std::int64_t pixels() const { return batch * out_height * out_width; }
  std::int64_t reach(int axis) const { return dilation[axis] * (kernel[axis] - 1) + 1; }
  std::int64_t taps() const { return kernel[0] * kernel[1]; }
  bool depthwise() const { return groups >= kLeast && groups == channels && groups == n; }
  bool pointwise() const {
    return taps() == 1 && stride[0] == 1 && stride[1] == 1 && padding[0] == 0 && padding[1] == 0;
  }
};

bool channels_last(const View& x) {
  const std::int64_t c = x.sizes[1], w = x.sizes[3];
  const std::int64_t wanted[] = {x.sizes[2] * w * c, 1, w * c, c};
  for (int axis = 0; axis < 4; ++axis)
    if (x.sizes[axis] > 1 && x.strides[axis] != wanted[axis]) return false;
  return true;
}

// Pixels [begin, end) of a row, channels innermost.
void copy_pixels(const View& x, std::int64_t b, std::int64_t row, std::int64_t begin, std::int64_t end, float* to) {
  const std::int64_t c = x.sizes[1], count = end - begin;
  const float* const from = x.data + b * x.strides[0] + row * x.strides[2] + begin * x.strides[3];
  if (x.strides[1] == 1 && x.strides[3] == c) {
    std::memcpy(to, from, static_cast<std::size_t>(count * c) * sizeof(float));
    return;
  }
  for (std::int64_t channel = 0; channel < c; ++channel)
    for (std::int64_t i = 0; i < count; ++i) to[i * c + channel] = from[channel * x.strides[1] + i * x.strides[3]];
}

// The tensor with its channels innermost: itself, or a copy.
template <int Use>
const float* innermost(const View& x) {
  if (channels_last(x)) return x.data;
  const std::int64_t rows = x.sizes[0] * x.sizes[2], row = x.sizes[3] * x.sizes[1];
  float* const copy = scratch<Use>(rows * row);
  for (std::int64_t i = 0; i < rows; ++i) copy_pixels(x, i / x.sizes[2], i % x.sizes[2], 0, x.sizes[3], copy + i * row);
  return copy;
}

// Outputs [begin, end), all of one image: either whole rows but for the first and the last, or part of one row.
struct Piece {
  Piece(const Shape& s, std::int64_t begin, std::int64_t end)
      : count(end - begin),
        b(begin / (s.out_height * s.out_width)),
        row(begin / s.out_width % s.out_height),
        rows((end - 1) / s.out_width % s.out_height + 1 - row),
        column(rows == 1 ? begin % s.out_width : 0),
        columns(rows == 1 ? count : s.out_width),
        first(rows == 1 ? 0 : begin % s.out_width) {}

  std::int64_t count, b, row, rows, column, columns;
  std::int64_t first;  // output, counted from the first row and column
};

// What a piece of the output looks at, as the product takes it: pixels `pixel` elements apart, in lines.
template <class Element>
struct Image {
  const Element* data;
  std::int64_t pixel, line;
};

// A copy in which the padding is zeros.
template <class Element>
Image<Element> padded(const Shape& s, const View& x, const Piece& piece) {
  const std::int64_t c = s.channels / s.groups, size = elements<Element>(c), pixel = size * s.groups;
  const std::int64_t top = piece.row * s.stride[0] - s.padding[0], left = piece.column * s.stride[1] - s.padding[1];
  const std::int64_t height = (piece.rows - 1) * s.stride[0] + s.reach(0);
  const std::int64_t width = (piece.columns - 1) * s.stride[1] + s.reach(1), line = width * pixel;
  const std::int64_t begin = std::clamp<std::int64_t>(-left, 0, width);
  const std::int64_t end = std::clamp<std::int64_t>(s.width - left, begin, width);
  Element* const copy = scratch<4, Element>(height * line);
  for (std::int64_t i = 0; i < height; ++i) {
    Element* const to = copy + i * line;
    const bool inside = top + i >= 0 && top + i < s.height && begin < end;
    std::fill(to, to + (inside ? begin * pixel : line), Element{});
    if (!inside) continue;
    std::fill(to + end * pixel, to + line, Element{});
    if constexpr (std::is_same_v<Element, float>) {
      copy_pixels(x, piece.b, top + i, left + begin, left + end, to + begin * pixel);
    } else {
      float* const row = scratch<6>((end - begin) * s.channels);
      copy_pixels(x, piece.b, top + i, left + begin, left + end, row);
      for (std::int64_t j = 0; j < (end - begin) * s.groups; ++j)
        round_to(row + j * c, c, to + begin * pixel + j * size);
    }
  }
  return {copy, pixel, line};
}

template <class Element>
Image<Element> input(const Shape& s, const View& x, const Piece& piece) {
  if constexpr (std::is_same_v<Element, float>) {
    if (channels_last(x) && s.padding[0] == 0 && s.padding[1] == 0) {
      const std::int64_t line = s.width * s.channels, row = piece.b * s.height + piece.row * s.stride[0];
      return {x.data + row * line + piece.column * s.stride[1] * s.channels, s.channels, line};
    }
  }
  return padded<Element>(s, x, piece);
}

// Outputs of a piece, columns [first, last) of each group.
template <class Element>
void convolve(const Shape& s, const Image<Element>& x, const Element* packed, const Piece& piece, std::int64_t first,
              std::int64_t last, const Finish& finish, float* out) {
  const std::int64_t c = elements<Element>(s.channels / s.groups), n = s.n / s.groups;
  const std::int64_t panel = s.taps() * c * kPanel, group_size = panels_of(n) * panel;
  const bool side_by_side = s.dilation[1] == 1 && x.pixel == c;  // the taps of a row are one piece
  const std::int64_t columns = side_by_side ? 1 : s.kernel[1], count = s.kernel[0] * columns;
  std::int64_t* const places = scratch<7, std::int64_t>(count);
  for (std::int64_t i = 0; i < count; ++i)
    places[i] = i / columns * s.dilation[0] * x.line + i % columns * s.dilation[1] * x.pixel;
  const Terms k(side_by_side ? c * s.kernel[1] : c, {places, static_cast<std::size_t>(count)});
  const std::int64_t step = piece.columns > kNarrow ? kPanel : last - first;
  for (std::int64_t group = 0; group < s.groups; ++group)
    for (std::int64_t column = first; column < last; column += step)
      for (std::int64_t done = 0, run; done < piece.count; done += run) {
        const std::int64_t line = (piece.first + done) / piece.columns, at = (piece.first + done) % piece.columns;
        run = std::min(piece.columns - at, piece.count - done);
        Finish mine = finish;
        if (finish.bias != nullptr) mine.bias += group * n;
        if (finish.residual != nullptr) mine.residual += done * s.n + group * n;
        const Rows<const Element> from{x.data + group * c + line * s.stride[0] * x.line + at * s.stride[1] * x.pixel,
                                       s.stride[1] * x.pixel};
        multiply(run, k, from, {packed + group * group_size, n, panel}, column, std::min(column + step, last), mine,
                 {out + done * s.n + group * n, s.n});
      }
}

// A tap: how far into the image it looks, and into the weights.
struct Tap {
  std::int64_t input, weights;
};

// The taps of an output that lie inside the image.
std::span<const Tap> taps_inside(const Shape& s, std::int64_t row, std::int64_t column) {
  Tap* const taps = scratch<7, Tap>(s.taps());
  std::size_t count = 0;
  const std::int64_t wide = panels_of(s.n) * kPanel;
  for (std::int64_t i = 0; i < s.taps(); ++i) {
    const std::int64_t y = row * s.stride[0] - s.padding[0] + i / s.kernel[1] * s.dilation[0];
    const std::int64_t x = column * s.stride[1] - s.padding[1] + i % s.kernel[1] * s.dilation[1];
    if (y >= 0 && y < s.height && x >= 0 && x < s.width) taps[count++] = {(y * s.width + x) * s.channels, i * wide};
  }
  return {taps, count};
}

// COUNT neighbouring outputs of a vector of channels; they look at pixels that are `step` apart.
template <int COUNT>
[[gnu::noinline]] void depthwise_block(std::span<const Tap> taps, const float* x, std::int64_t step,
                                       const float* packed, Floats bias, Rows<float> to) {
  Floats sums[COUNT];
#pragma GCC unroll 8
  for (int i = 0; i < COUNT; ++i) sums[i] = Floats{};
  for (const Tap& tap : taps) {
    const Floats w = load(packed + tap.weights);
#pragma GCC unroll 8
    for (int i = 0; i < COUNT; ++i) sums[i] += load(x + tap.input + i * step) * w;
  }
#pragma GCC unroll 8
  for (int i = 0; i < COUNT; ++i) store(to[i], sums[i] + bias);
}

constexpr int kOutputs = 8;  // of a block at most

template <int COUNT = kOutputs, class... Arguments>
void depthwise_blocks(std::int64_t count, const Arguments&... arguments) {
  if constexpr (COUNT > 0) {
    if (count == COUNT)
      depthwise_block<COUNT>(arguments...);
    else
      depthwise_blocks<COUNT - 1>(count, arguments...);
  }
}

// One thread's outputs [pixels.begin, pixels.end) where each channel has a kernel of its own: in runs that all taps of
// lie inside the image, and one by one at its sides. The last vector of channels begins where it ends with them.
void depthwise(const Shape& s, const float* x, const float* packed, Share pixels, const Finish& finish, float* out) {
  const std::int64_t image = s.height * s.width * s.channels, step = s.stride[1] * s.channels;
  const std::int64_t first = (s.padding[1] + s.stride[1] - 1) / s.stride[1];
  const std::int64_t last =
      s.width + s.padding[1] < s.reach(1) ? 0 : (s.width + s.padding[1] - s.reach(1)) / s.stride[1] + 1;
  for (std::int64_t p = pixels.begin; p < pixels.end;) {
    const std::int64_t column = p % s.out_width;
    const std::span<const Tap> taps = taps_inside(s, p / s.out_width % s.out_height, column);
    const float* const from = x + p / (s.out_height * s.out_width) * image;
    const std::int64_t run = column < first || column >= last ? 1 : std::min(last - column, pixels.end - p);
    const int blocks = static_cast<int>((run + kOutputs - 1) / kOutputs);
    for (int i = 0; i < blocks; ++i) {
      const Share block(run, i, blocks);
      const std::int64_t count = block.end - block.begin;
      const Rows<float> to{out + (p + block.begin) * s.n, s.n};
      for (std::int64_t c = 0; c < s.n; c += kLanes) {
        const std::int64_t at = std::min(c, s.n - kLanes);
        const Floats bias = finish.bias == nullptr ? Floats{} : load(finish.bias + at);
        depthwise_blocks(count, taps, from + block.begin * step + at, step, packed + at, bias,
                         Rows<float>{to[0] + at, s.n});
      }
      if (finish.residual == nullptr && finish.activation == Activation::none) continue;
      for (std::int64_t row = 0; row < count; ++row)
        finish_row(to[row], finish.residual == nullptr ? nullptr : finish.residual + (p + block.begin + row) * s.n,
                   finish.activation, s.n, to[row]);
    }
    p += run;
  }
}

// One thread's outputs [pixels.begin, pixels.end), columns [first, last) of each group; their inputs stay in the
// second-level cache, while the weights go by.
template <class Element>
void convolve(const Shape& s, const View& x, const Element* packed, Share pixels, std::int64_t first, std::int64_t last,
              const Finish& finish, float* out) {
  constexpr std::int64_t kCached = 1 << 16;  // floats
  const std::int64_t image = s.out_height * s.out_width;
  const std::int64_t most = std::max<std::int64_t>(kCached / (s.channels * s.stride[0] * s.stride[1]), 48);
  for (std::int64_t begin = pixels.begin, end; begin < pixels.end; begin = end) {
    const std::int64_t row = begin / s.out_width * s.out_width;  // its first output
    end = most < s.out_width ? std::min(begin + most, row + s.out_width) : row + most / s.out_width * s.out_width;
    end = std::min({end, (begin / image + 1) * image, pixels.end});
    const Piece piece(s, begin, end);
    Finish mine = finish;
    if (finish.residual != nullptr) mine.residual += begin * s.n;
    convolve(s, input<Element>(s, x, piece), packed, piece, first, last, mine, out + begin * s.n);
  }
}

template <class Element>
void run(const Shape& s, const View& x, const Element* packed, const Finish& finish, float* out) {
  const std::int64_t c = s.channels / s.groups, n = s.n / s.groups, panels = panels_of(n);
  if (s.pointwise() && s.groups == 1 && channels_last(x))
    return linear<Element>(s.pixels(), c, {x.data, c}, {packed, n, elements<Element>(c) * kPanel}, finish, {out, n});
  const int threads = threads_for(s.pixels() * s.taps() * c * s.n);
  const bool by_pixels = s.pixels() >= s.n || panels % threads != 0;
  in_parallel(threads, [&](int index, int count) {
    const Share pixels(s.pixels(), by_pixels ? index : 0, by_pixels ? count : 1);
    const Share mine(panels, by_pixels ? 0 : index, by_pixels ? 1 : count);
    convolve(s, x, packed, pixels, mine.begin * kPanel, std::min(mine.end * kPanel, n), finish, out);
  });
}

void run_depthwise(const Shape& s, const float* x, const float* packed, const Finish& finish, float* out) {
  in_parallel(threads_for(s.pixels() * s.taps() * s.n),
              [&](int index, int count) { depthwise(s, x, packed, {s.pixels(), index, count}, finish, out); });
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
    View x(input);
    const View packed(weight);
    x.require_float(4);
    require(kernel_len == 2 && stride_len == 2 && padding_len == 2 && dilation_len == 2 && groups >= 1 && n >= 1);
    // products are made of lines of pixels: a column, which lies in memory as a line does, becomes one
    const bool column = x.sizes[3] == 1 && kernel[1] == 1 && padding[1] == 0;
    std::int64_t sizes_as_line[] = {x.sizes[0], x.sizes[1], 1, x.sizes[2]};
    std::int64_t strides_as_line[] = {x.strides[0], x.strides[1], x.strides[3], x.strides[2]};
    if (column) x.sizes = sizes_as_line, x.strides = strides_as_line;
    Shape s{x.sizes[0], x.sizes[1], x.sizes[2], x.sizes[3], 0, 0, n, {}, {}, {}, {}, groups};
    for (int axis : {0, 1}) {
      const int given = column ? 1 - axis : axis;
      s.kernel[axis] = kernel[given];
      s.stride[axis] = stride[given];
      s.padding[axis] = padding[given];
      s.dilation[axis] = dilation[given];
      require(s.kernel[axis] >= 1 && s.stride[axis] >= 1 && s.padding[axis] >= 0 && s.dilation[axis] >= 1);
      const std::int64_t room = x.sizes[2 + axis] + 2 * s.padding[axis] - s.reach(axis);
      require(room >= 0);
      (axis == 0 ? s.out_height : s.out_width) = room / s.stride[axis] + 1;
    }
    require(s.channels % groups == 0 && n % groups == 0);
    const std::int64_t k = s.taps() * (s.channels / groups), panels = panels_of(n / groups);
    if (s.depthwise())
      packed.require_float({1, 1, s.taps(), panels_of(n) * kPanel});
    else if (packed.is_bfloat16())
      packed.require_pairs({groups, panels, s.taps() * elements<Pair>(s.channels / groups), kPanel, 2});
    else
      packed.require_float({groups, panels, k, kPanel});
    const std::int64_t height = column ? s.out_width : s.out_height, width = column ? 1 : s.out_width;
    const std::int64_t sizes[] = {s.batch, n, height, width}, strides[] = {height * width * n, 1, width * n, n};
    Finish finish;
    finish.activation = static_cast<Activation>(act);
    finish.bias = bias_of(bias, n);
    if (residual != nullptr) {
      const View r(*residual);
      r.require_float(4);
      require(std::equal(sizes, sizes + 4, r.sizes));
      finish.residual = innermost<5>(r);
      finish.residual_stride = n;
    }
    const View y = empty(4, sizes, strides, out);
    if (s.pixels() == 0) return;
    if (s.depthwise())
      run_depthwise(s, innermost<6>(x), packed.data, finish, y.data);
    else if (packed.is_bfloat16())
      run(s, x, packed.as<Pair>(), finish, y.data);
    else
      run(s, x, packed.as<float>(), finish, y.data);
  });
}
