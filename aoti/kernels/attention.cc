// mctl::mctl_attention(q [b, h, l, e], k [b, h, s, e], v [b, h, s, d], mask?, scale, causal) -> [b, h, l, d]
//
// For each head, keys and values are packed once, then blocks of rows of q go through: scores, softmax, product.
#include <cmath>

#include "linear.h"
#include "tensor.h"

namespace mctl {
namespace {

constexpr std::int64_t kBlock = 16;  // rows of q at a time: their scores stay in the cache

std::int64_t rounded(std::int64_t count) { return panels_of(count) * kPanel; }

// A mask of scores: float numbers that are added, or booleans that say what is looked at. Broadcast axes have stride 0.
struct Mask {
  const void* data = nullptr;
  bool boolean = false;
  std::int64_t strides[4] = {};

  // To row `l` of head `h` of batch `b`, from column 0 on.
  void apply(std::int64_t b, std::int64_t h, std::int64_t l, std::int64_t columns, float* scores) const {
    const std::int64_t from = b * strides[0] + h * strides[1] + l * strides[2], step = strides[3];
    if (boolean) {
      const bool* const seen = static_cast<const bool*>(data) + from;
      for (std::int64_t s = 0; s < columns; ++s) scores[s] = seen[s * step] ? scores[s] : -INFINITY;
    } else {
      const float* const added = static_cast<const float*>(data) + from;
      for (std::int64_t s = 0; s < columns; ++s) scores[s] += added[s * step];
    }
  }
};

struct Attention {
  const View &q, &k, &v;
  const View& out;
  Mask mask;
  float scale;
  bool causal;

  std::int64_t heads() const { return q.sizes[1]; }
  std::int64_t length() const { return q.sizes[2]; }
  std::int64_t keys() const { return k.sizes[2]; }
  std::int64_t depth() const { return q.sizes[3]; }
  std::int64_t width() const { return v.sizes[3]; }

  static float* at(const View& tensor, std::int64_t b, std::int64_t h) {
    return tensor.data + b * tensor.strides[0] + h * tensor.strides[1];
  }

  // Floats from one row of scores to the next: an odd number of vectors, so that rows do not collide in the cache.
  std::int64_t row_of_scores() const { return rounded(keys()) + kLanes; }

  // Values can be read where they lie, 32 columns at a time.
  bool values_in_place() const { return width() % kPanel == 0 && v.strides[3] == 1; }

  // k transposed and scaled, [ceil(s / 32)][e][32], and v, [s][ceil(d / 32) * 32].
  void pack(std::int64_t b, std::int64_t h, float* keys_to, float* values_to) const {
    const std::int64_t count = keys(), deep = depth(), step = k.strides[2], apart = k.strides[3];
    const float* from = at(k, b, h);
    for (std::int64_t s = 0; s < count; s += kPanel, from += kPanel * step)
      for (std::int64_t e = 0; e < deep; ++e, keys_to += kPanel) {
        const float* const column = from + e * apart;
        const std::int64_t rows = std::min(kPanel, count - s);
        for (std::int64_t i = 0; i < rows; ++i) keys_to[i] = column[i * step] * scale;
        std::fill(keys_to + rows, keys_to + kPanel, 0.0f);
      }
    if (values_in_place()) return;
    const std::int64_t columns = width(), wide = rounded(columns), column_step = v.strides[3];
    const float* values = at(v, b, h);
    for (std::int64_t s = 0; s < count; ++s, values += v.strides[2], values_to += wide) {
      for (std::int64_t d = 0; d < columns; ++d) values_to[d] = values[d * column_step];
      std::fill(values_to + columns, values_to + wide, 0.0f);
    }
  }

  // Rows [begin, end) of q: where they lie, or, if their elements are apart, a copy.
  Rows<const float> queries(std::int64_t b, std::int64_t h, std::int64_t begin, std::int64_t end) const {
    const Rows<const float> from{at(q, b, h) + begin * q.strides[2], q.strides[2]};
    const std::int64_t deep = depth(), apart = q.strides[3];
    if (apart == 1 || deep == 1) return from;
    const Rows<float> copy{scratch<7>(kBlock * deep), deep};
    for (std::int64_t row = 0; row < end - begin; ++row)
      for (std::int64_t e = 0; e < deep; ++e) copy[row][e] = from[row][e * apart];
    return {copy.data, copy.stride};
  }

  // Rows [begin, end) of one head.
  void rows(std::int64_t b, std::int64_t h, std::int64_t begin, std::int64_t end, const float* packed_keys,
            const float* packed_values, float* scores) const {
    const std::int64_t wide = row_of_scores();
    const std::int64_t seen = causal ? std::min(end, keys()) : keys();  // columns that any of the rows looks at
    multiply(end - begin, depth(), queries(b, h, begin, end), {packed_keys, seen, depth() * kPanel}, 0, seen, {},
             {scores, wide});
    float parts[kBlock];
    for (std::int64_t row = begin; row < end; ++row) {
      float* const mine = scores + (row - begin) * wide;
      if (mask.data != nullptr) mask.apply(b, h, row, seen, mine);
      if (causal)
        for (std::int64_t s = row + 1; s < seen; ++s) mine[s] = -INFINITY;
      parts[row - begin] = softmax(mine, seen);
    }
    const Rows<float> to{at(out, b, h) + begin * out.strides[2], out.strides[2]};
    const Packed<float> values = values_in_place() ? Packed<float>{at(v, b, h), width(), kPanel, v.strides[2]}
                                                   : Packed<float>{packed_values, width(), kPanel, rounded(width())};
    multiply(end - begin, seen, {scores, wide}, values, 0, width(), {}, to);
    for (std::int64_t row = 0; row < end - begin; ++row) {
      float* const mine = to[row];
      const float part = parts[row];
      for (std::int64_t d = 0, columns = width(); d < columns; ++d) mine[d] *= part;
    }
  }

  // e^(score - largest) in place; returns what they have to be multiplied by. A row that looks at nothing gives
  // zeros, as torch's does.
  static float softmax(float* scores, std::int64_t count) {
    const std::int64_t whole = count / kLanes * kLanes;
    Floats most = all(-INFINITY);
    for (std::int64_t s = 0; s < whole; s += kLanes) {
      const Floats x = load(scores + s);
      most = x > most ? x : most;
    }
    float largest = folded(most, [](auto a, auto b) { return a > b ? a : b; });
    for (std::int64_t s = whole; s < count; ++s) largest = std::max(largest, scores[s]);
    const float base = largest == -INFINITY ? 0.0f : largest;
    Floats sums{};
    for (std::int64_t s = 0; s < whole; s += kLanes) {
      const Floats y = exp<true>(load(scores + s) - base);
      store(scores + s, y);
      sums += y;
    }
    float sum = 0;
    if (const int rest = static_cast<int>(count - whole); rest > 0) {
      const Floats y = exp<true>(load(scores + whole, rest) - base);
      store(scores + whole, y, rest);
      for (int lane = 0; lane < rest; ++lane) sum += y[lane];
    }
    sum += folded(sums, [](auto a, auto b) { return a + b; });
    return sum == 0.0f ? 0.0f : 1.0f / sum;
  }

  // Heads are shared out among the threads; where there are fewer of them, so are their blocks of rows.
  void run() const {
    const std::int64_t all_heads = q.sizes[0] * heads();
    const int threads = threads_for(all_heads * length() * keys() * (depth() + width()));
    const std::int64_t blocks = (length() + kBlock - 1) / kBlock;
    const std::int64_t parts = all_heads >= threads ? 1 : std::min<std::int64_t>(blocks, threads);
    in_parallel(threads, [&](int index, int count) {
      const std::int64_t wide = rounded(keys());
      float* const packed_keys = scratch<3>(wide * depth() + keys() * rounded(width()) + kBlock * row_of_scores());
      float* const packed_values = packed_keys + wide * depth();
      float* const scores = packed_values + keys() * rounded(width());
      const Share mine(all_heads * parts, index, count);
      for (std::int64_t job = mine.begin; job < mine.end; ++job) {
        const std::int64_t b = job / parts / heads(), h = job / parts % heads();
        const Share block(blocks, static_cast<int>(job % parts), static_cast<int>(parts));
        pack(b, h, packed_keys, packed_values);
        for (std::int64_t i = block.begin; i < block.end; ++i)
          rows(b, h, i * kBlock, std::min((i + 1) * kBlock, length()), packed_keys, packed_values, scores);
      }
    });
  }
};

}  // namespace
}  // namespace mctl

MCTL_ENTRY std::int32_t aoti_torch_cpu_mctl_attention(AtenTensorHandle query, AtenTensorHandle key,
                                                      AtenTensorHandle value, AtenTensorHandle* mask, double scale,
                                                      std::int32_t causal, AtenTensorHandle* out) {
  using namespace mctl;
  return guarded([&] {
    const View q(query), k(key), v(value);
    for (const View* tensor : {&q, &k, &v}) tensor->require_float(4);
    for (int axis : {0, 1}) require(k.sizes[axis] == q.sizes[axis] && v.sizes[axis] == q.sizes[axis]);
    require(k.sizes[3] == q.sizes[3] && k.sizes[2] == v.sizes[2]);
    const std::int64_t b = q.sizes[0], h = q.sizes[1], l = q.sizes[2], d = v.sizes[3];
    Mask over;
    if (mask != nullptr) {
      const View m(*mask);
      over.boolean = m.dtype == aoti_torch_dtype_bool();
      require(m.rank == 4 && (over.boolean || m.dtype == aoti_torch_dtype_float32()));
      const std::int64_t wanted[] = {b, h, l, k.sizes[2]};
      for (int axis = 0; axis < 4; ++axis) {
        require(m.sizes[axis] == wanted[axis] || m.sizes[axis] == 1);
        over.strides[axis] = m.sizes[axis] == 1 ? 0 : m.strides[axis];
      }
      over.data = m.data;
    }
    const std::int64_t sizes[] = {b, h, l, d}, strides[] = {l * h * d, d, h * d, 1};
    const View y = empty(4, sizes, strides, out);
    if (b * h * l * d > 0) Attention{q, k, v, y, over, static_cast<float>(scale), causal != 0}.run();
  });
}
