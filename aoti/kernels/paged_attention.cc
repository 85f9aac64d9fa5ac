// mctl::mctl_paged_attention(q [t, h, e], k [t, g, e], v [t, g, d], kv [layers, blocks, g, 16 * (e + d)], slots [t],
//                            tables [r, b], lengths [r], ends [r], sinks [h]?, layer, scale, window, softcap)
//   -> [t, h, d], and keys and values in kv
//
// t tokens of r requests: those of request r lie before ends[r], they are the last ones of its lengths[r] tokens, and
// its keys are in the blocks tables[r], 16 in each. A block of one head holds its keys transposed, [e][16], then its
// values, [16][d], as float32 or bfloat16. First keys and values go to their slots (16 * block + place; none if below
// 0), then each token attends to those of its request up to itself, from `window` back, if that is not 0.
//
// What a token gets depends on keys and values alone, and on their positions: scores are summed in the order of e, and
// the weighted sum of values in the order of the keys of one stretch (kStretch positions, which begin at multiples of
// that), and stretches are joined in their order. So it is the same to the bit whatever else is computed beside it, in
// which steps the tokens came, where their blocks lie, and on how many threads.
#include <atomic>
#include <cmath>
#include <vector>

#include "linear.h"
#include "tensor.h"

namespace mctl {
namespace {

constexpr std::int64_t kBlock = 16;  // keys
constexpr std::int64_t kStretch = 256;
constexpr std::int64_t kTile = 32;                     // rows, that is tokens times query heads, which share loads
constexpr int kRowsAtOnce = kRegisters == 32 ? 4 : 3;  // in registers,
constexpr int kAtOnce = 4;                             // times so many vectors of keys or of columns
constexpr int kVectors = static_cast<int>(kBlock) / kLanes;  // of a block's keys

using Bfloat16 = std::uint16_t;

inline Floats load(const Bfloat16* at) {
  typedef Bfloat16 Halves __attribute__((vector_size(kLanes * sizeof(Bfloat16))));
  Halves halves;
  std::memcpy(&halves, at, sizeof halves);
  return (Floats)(__builtin_convertvector(halves, Ints) << 16);
}

inline Floats load(const float* at) { return mctl::load(at); }

template <class Element>
inline Floats load(const Element* at, int count) {
  if (count == kLanes) return load(at);
  Element beside[kLanes] = {};
  std::memcpy(beside, at, static_cast<std::size_t>(count) * sizeof(Element));
  return load(beside);
}

inline void put(float* at, float x) { *at = x; }
inline void put(Bfloat16* at, float x) { *at = static_cast<Bfloat16>(rounded(x)); }

[[gnu::noinline]] float exp_of(float x) { return exp<true>(all(x))[0]; }

// Whole numbers of a tensor of one or two axes.
struct Numbers {
  explicit Numbers(AtenTensorHandle tensor, std::int64_t rank) {
    const View view(tensor);
    require(view.rank == rank && view.dtype == aoti_torch_dtype_int64());
    data = view.as<std::int64_t>();
    rows = view.sizes[0];
    columns = rank == 2 ? view.sizes[1] : 1;
    row = view.strides[0];
    column = rank == 2 ? view.strides[1] : 1;
  }
  std::int64_t operator[](std::int64_t i) const { return data[i * row]; }
  std::int64_t at(std::int64_t i, std::int64_t j) const { return data[i * row + j * column]; }

  const std::int64_t* data;
  std::int64_t rows, columns, row, column;
};

// Keys [begin, end), by position.
struct Span {
  std::int64_t begin, end;
  bool empty() const { return begin >= end; }
  Span within(Span other) const { return {std::max(begin, other.begin), std::min(end, other.end)}; }
};

// Softmax over some keys, and the values weighted by it, not yet divided by the sum. Without keys the sum is 0.
struct Part {
  float* largest;  // [rows]
  float* sum;      // [rows]
  Rows<float> value;
};

// to = softmax over the keys of both.
[[gnu::noinline]] void join(const Part& to, const Part& from, std::int64_t row, std::int64_t wide) {
  if (from.sum[row] == 0.0f) return;
  if (to.sum[row] == 0.0f) {
    to.largest[row] = from.largest[row];
    to.sum[row] = from.sum[row];
    std::memcpy(to.value[row], from.value[row], static_cast<std::size_t>(wide) * sizeof(float));
    return;
  }
  const float largest = std::max(to.largest[row], from.largest[row]);
  const float old = exp_of(to.largest[row] - largest), added = exp_of(from.largest[row] - largest);
  to.largest[row] = largest;
  to.sum[row] = to.sum[row] * old + from.sum[row] * added;
  float* const mine = to.value[row];
  const float* const theirs = from.value[row];
  for (std::int64_t d = 0; d < wide; d += kLanes)
    store(mine + d, mctl::load(mine + d) * old + mctl::load(theirs + d) * added);
}

// Scores of MR rows of q with NV vectors of keys, each of which begins at keys[j] and has one vector in kBlock
// elements.
template <int MR, int NV, class Element>
[[gnu::noinline]] void score(std::int64_t deep, Rows<const float> q, const Element* const* keys, Rows<float> to) {
  Floats sums[MR][NV] = {};
  for (std::int64_t e = 0; e < deep; ++e) {
    Floats k[NV];
#pragma GCC unroll 16
    for (int j = 0; j < NV; ++j) k[j] = load(keys[j] + e * kBlock);
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i) {
      const Floats factor = all(q[i][e]);
#pragma GCC unroll 16
      for (int j = 0; j < NV; ++j) sums[i][j] = plus_product(sums[i][j], factor, k[j]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i)
#pragma GCC unroll 16
    for (int j = 0; j < NV; ++j) store(to[i] + j * kLanes, sums[i][j]);
}

// to += weights x values, of MR rows and NV vectors of columns, the last of which has `last` columns; weights[i][0] is
// that of key span.begin. `blocks` are where the values of each block begin, that of position 0 first.
template <int MR, int NV, class Element>
[[gnu::noinline]] void weigh(Span span, Rows<const float> weights, const Element* const* blocks, std::int64_t step,
                             std::int64_t column, int last, Rows<float> to) {
  Floats sums[MR][NV];
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i)
#pragma GCC unroll 16
    for (int j = 0; j < NV; ++j) sums[i][j] = mctl::load(to[i] + column + j * kLanes);
  for (std::int64_t key = span.begin; key < span.end; ++key) {
    const Element* const at = blocks[key / kBlock] + key % kBlock * step + column;
    Floats v[NV];
#pragma GCC unroll 16
    for (int j = 0; j < NV; ++j) v[j] = j + 1 < NV ? load(at + j * kLanes) : load(at + j * kLanes, last);
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i) {
      const Floats factor = all(weights[i][key - span.begin]);
#pragma GCC unroll 16
      for (int j = 0; j < NV; ++j) sums[i][j] = plus_product(sums[i][j], factor, v[j]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i)
#pragma GCC unroll 16
    for (int j = 0; j < NV; ++j) store(to[i] + column + j * kLanes, sums[i][j]);
}

// Calls work with the compile-time number `rows`, at most MR.
template <int MR = kRowsAtOnce, class Work>
void with_rows(std::int64_t rows, const Work& work) {
  if constexpr (MR > 0) {
    if (rows == MR)
      work(std::integral_constant<int, MR>{});
    else
      with_rows<MR - 1>(rows, work);
  }
}

// Tokens [begin, end) of a request, one after the other by position.
struct Tile {
  std::int64_t request, begin, end;
  std::int64_t position;  // of the first
};

template <class Element>
struct PagedAttention {
  const View &q, &k, &v;
  const Numbers &slots, &tables, &lengths, &ends;
  const float* sinks;
  Element* kv;  // of the layer
  std::int64_t blocks, window;
  float scale, softcap;
  const View& out;

  std::int64_t tokens() const { return q.sizes[0]; }
  std::int64_t heads() const { return k.sizes[1]; }             // of keys
  std::int64_t shared() const { return q.sizes[1] / heads(); }  // by so many query heads
  std::int64_t depth() const { return q.sizes[2]; }
  std::int64_t width() const { return v.sizes[2]; }
  std::int64_t wide() const { return (width() + kLanes - 1) / kLanes * kLanes; }
  std::int64_t most_rows() const { return std::max(kTile, shared()); }

  Element* block(std::int64_t index, std::int64_t head) const {
    return kv + (index * heads() + head) * kBlock * (depth() + width());
  }

  static const float* at(const View& x, std::int64_t token, std::int64_t head) {
    return x.data + token * x.strides[0] + head * x.strides[1];
  }

  Span seen_from(std::int64_t position) const {
    return {window > 0 ? std::max<std::int64_t>(0, position - window + 1) : 0, position + 1};
  }

  // Keys and values of tokens [begin, end) to their slots.
  void keep(std::int64_t begin, std::int64_t end) const {
    const std::int64_t deep = depth(), columns = width(), apart = k.strides[2], beside = v.strides[2];
    for (std::int64_t token = begin; token < end; ++token) {
      if (slots[token] < 0) continue;
      for (std::int64_t head = 0; head < heads(); ++head) {
        Element* const to = block(slots[token] / kBlock, head);
        const std::int64_t place = slots[token] % kBlock;
        const float* const key = at(k, token, head);
        for (std::int64_t e = 0; e < deep; ++e) put(to + e * kBlock + place, key[e * apart]);
        const float* const value = at(v, token, head);
        for (std::int64_t d = 0; d < columns; ++d) put(to + deep * kBlock + place * columns + d, value[d * beside]);
      }
    }
  }

  // The tiles of all requests. Throws where a request is not what the tensors can hold.
  std::vector<Tile> tiles() const {
    std::vector<Tile> found;
    const std::int64_t most = std::max<std::int64_t>(1, kTile / shared());
    std::int64_t begin = 0;
    for (std::int64_t request = 0; request < ends.rows; ++request) {
      const std::int64_t end = ends[request], length = lengths[request];
      require(begin <= end && end <= tokens() && end - begin <= length && length <= tables.columns * kBlock);
      const std::int64_t first = length - (end - begin);
      if (begin < end) {
        for (std::int64_t i = seen_from(first).begin / kBlock; i * kBlock < length; ++i)
          require(0 <= tables.at(request, i) && tables.at(request, i) < blocks);
        const std::int64_t count = (end - begin + most - 1) / most;
        for (std::int64_t i = 0; i < count; ++i) {
          const Share share(end - begin, static_cast<int>(i), static_cast<int>(count));
          found.push_back({request, begin + share.begin, begin + share.end, first + share.begin});
        }
      }
      begin = end;
    }
    for (std::int64_t token = begin; token < tokens(); ++token)  // of no request
      std::memset(out.data + token * out.strides[0], 0, static_cast<std::size_t>(out.strides[0]) * sizeof(float));
    return found;
  }

  Span seen_by(const Tile& tile) const {
    return {seen_from(tile.position).begin, tile.position + (tile.end - tile.begin)};
  }

  static Span stretch(std::int64_t index) { return {index * kStretch, (index + 1) * kStretch}; }

  // The stretches that a tile looks at: [begin, end).
  Span stretches(const Tile& tile) const {
    const Span seen = seen_by(tile);
    return {seen.begin / kStretch, (seen.end + kStretch - 1) / kStretch};
  }

  // Memory of one tile of one head. Rows of scores are an odd number of vectors apart: they do not collide in the
  // cache.
  struct Room {
    explicit Room(const PagedAttention& of) {
      const std::int64_t rows = of.most_rows(), row = kStretch + kLanes;
      float* at = scratch<8>(rows * (of.depth() + row + 2 * of.wide() + 4));
      queries = {at, of.depth()};
      scores = {at += rows * of.depth(), row};
      at += rows * row;
      for (Part* part : {&one, &whole}) {
        part->value = {at, of.wide()};
        part->largest = at += rows * of.wide();
        part->sum = at += rows;
        at += rows;
      }
    }
    Rows<float> queries, scores;
    Part one, whole;
  };

  std::int64_t rows_of(const Tile& tile) const { return (tile.end - tile.begin) * shared(); }

  // Row i of a tile is query head i % shared() of token i / shared().
  void take_queries(const Tile& tile, std::int64_t head, Rows<float> to) const {
    for (std::int64_t i = 0; i < rows_of(tile); ++i) {
      const float* const from = at(q, tile.begin + i / shared(), head * shared() + i % shared());
      for (std::int64_t e = 0; e < depth(); ++e) to[i][e] = from[e * q.strides[2]] * scale;
    }
  }

  // One stretch of keys, for all rows of a tile.
  void attend(const Tile& tile, std::int64_t head, std::int64_t index, const Room& room, const Part& to) const {
    const std::int64_t rows = rows_of(tile);
    const Span all_keys = stretch(index);
    const Span seen = seen_by(tile).within(all_keys);
    const std::int64_t first = seen.begin / kBlock * kBlock, count = (seen.end - first + kBlock - 1) / kBlock;
    const Element* keys[kStretch / kBlock];
    const Element* values[kStretch / kBlock];
    for (std::int64_t i = 0; i < count; ++i) {
      keys[i] = block(tables.at(tile.request, first / kBlock + i), head);
      values[i] = keys[i] + depth() * kBlock;
    }
    for (std::int64_t row = 0; row < rows; row += kRowsAtOnce)
      with_rows(std::min<std::int64_t>(kRowsAtOnce, rows - row), [&](auto together) {
        constexpr int kRows = together;
        score_blocks<kRows>(keys, count, {room.queries[row], room.queries.stride},
                            {room.scores[row], room.scores.stride});
        Span mine[kRows];
        for (int i = 0; i < kRows; ++i) {
          mine[i] = seen_from(tile.position + (row + i) / shared()).within(all_keys);
          mine[i] = {mine[i].begin - first, std::max(mine[i].begin, mine[i].end) - first};
          soften(room.scores[row + i], mine[i], count * kBlock, to, row + i);
          std::fill_n(to.value[row + i], wide(), 0.0f);
        }
        weigh_rows<kRows>(mine, values, {room.scores[row], room.scores.stride}, {to.value[row], to.value.stride});
      });
  }

  template <int kRows>
  void score_blocks(const Element* const* keys, std::int64_t count, Rows<const float> queries, Rows<float> to) const {
    constexpr int kTogether = std::max(1, kAtOnce / kVectors);
    const Element* vectors[kTogether * kVectors];
    const auto gather = [&](std::int64_t begin, int number) {
      for (int i = 0; i < number * kVectors; ++i) vectors[i] = keys[begin + i / kVectors] + i % kVectors * kLanes;
    };
    std::int64_t i = 0;
    for (; i + kTogether <= count; i += kTogether) {
      gather(i, kTogether);
      score<kRows, kTogether * kVectors>(depth(), queries, vectors, Rows<float>{to.data + i * kBlock, to.stride});
    }
    for (; i < count; ++i) {
      gather(i, 1);
      score<kRows, kVectors>(depth(), queries, vectors, Rows<float>{to.data + i * kBlock, to.stride});
    }
  }

  // Scores of one row become e^(score - largest), 0 for keys outside of `seen`.
  [[gnu::noinline]] void soften(float* scores, Span seen, std::int64_t count, const Part& to, std::int64_t row) const {
    if (softcap > 0)
      for (std::int64_t i = 0; i < count; i += kLanes)
        store(scores + i, softcap * tanh(mctl::load(scores + i) / softcap));
    std::fill(scores, scores + std::min(seen.begin, count), -INFINITY);
    std::fill(scores + std::min(std::max(seen.begin, seen.end), count), scores + count, -INFINITY);
    Floats most = all(-INFINITY);
    for (std::int64_t i = 0; i < count; i += kLanes) {
      const Floats x = mctl::load(scores + i);
      most = x > most ? x : most;
    }
    const float largest = folded(most, [](auto a, auto b) { return a > b ? a : b; });
    const float base = largest == -INFINITY ? 0.0f : largest;
    Floats sums{};
    for (std::int64_t i = 0; i < count; i += kLanes) {
      const Floats y = exp<true>(mctl::load(scores + i) - base);
      store(scores + i, y);
      sums += y;
    }
    to.largest[row] = base;
    to.sum[row] = folded(sums, [](auto a, auto b) { return a + b; });
  }

  // A row never touches values that it does not look at: they may be anything, and 0 times that is not always 0.
  template <int kRows>
  void weigh_rows(const Span* seen, const Element* const* values, Rows<const float> weights, Rows<float> to) const {
    Span common = seen[0];
    for (int i = 1; i < kRows; ++i) common = common.within(seen[i]);
    if (common.empty()) common.begin = common.end = seen[0].end;
    for (int i = 0; i < kRows; ++i)
      if (seen[i].begin < common.begin)
        weigh_span<1>({seen[i].begin, std::min(common.begin, seen[i].end)}, values, {weights[i], 0}, {to[i], 0});
    if (!common.empty()) weigh_span<kRows>(common, values, weights, to);
    for (int i = 0; i < kRows; ++i)
      if (std::max(common.end, seen[i].begin) < seen[i].end)
        weigh_span<1>({std::max(common.end, seen[i].begin), seen[i].end}, values, {weights[i], 0}, {to[i], 0});
  }

  template <int kRows>
  void weigh_span(Span span, const Element* const* values, Rows<const float> weights, Rows<float> to) const {
    const Rows<const float> from{weights.data + span.begin, weights.stride};
    std::int64_t column = 0;
    for (; column + kAtOnce * kLanes <= width(); column += kAtOnce * kLanes)
      weigh<kRows, kAtOnce>(span, from, values, width(), column, kLanes, to);
    for (; column < width(); column += kLanes)
      weigh<kRows, 1>(span, from, values, width(), column,
                      static_cast<int>(std::min<std::int64_t>(kLanes, width() - column)), to);
  }

  // The sums are complete: divided, with the sink as one more key without a value.
  [[gnu::noinline]] void finish(const Tile& tile, std::int64_t head, const Part& part) const {
    for (std::int64_t i = 0; i < rows_of(tile); ++i) {
      const std::int64_t query_head = head * shared() + i % shared();
      float factor = 1.0f, sum = part.sum[i];
      if (sinks != nullptr) {
        const float largest = std::max(part.largest[i], sinks[query_head]);
        factor = exp_of(part.largest[i] - largest);
        sum = sum * factor + exp_of(sinks[query_head] - largest);
      }
      const float share = sum == 0.0f ? 0.0f : factor / sum;
      float* const to = out.data + (tile.begin + i / shared()) * out.strides[0] + query_head * out.strides[1];
      for (std::int64_t d = 0; d < width(); ++d) to[d] = part.value[i][d] * share;
    }
  }

  static void clear(const Part& part, std::int64_t rows) { std::fill_n(part.sum, rows, 0.0f); }

  void join_all(const Tile& tile, const Part& to, const Part& from) const {
    for (std::int64_t row = 0; row < rows_of(tile); ++row) join(to, from, row, wide());
  }

  void whole_tile(const Tile& tile, std::int64_t head) const {
    const Room room(*this);
    take_queries(tile, head, room.queries);
    clear(room.whole, rows_of(tile));
    const Span parts = stretches(tile);
    for (std::int64_t index = parts.begin; index < parts.end; ++index) {
      attend(tile, head, index, room, room.one);
      join_all(tile, room.whole, room.one);
    }
    finish(tile, head, room.whole);
  }

  // For few tiles and many threads: the stretches of all tiles are computed side by side, and joined afterwards.
  void by_stretches(const std::vector<Tile>& found, int threads) const {
    struct Unit {
      std::size_t tile;
      std::int64_t head, stretch;
    };
    std::vector<Unit> units;
    for (std::size_t i = 0; i < found.size(); ++i)
      for (std::int64_t head = 0; head < heads(); ++head)
        for (std::int64_t index = stretches(found[i]).begin; index < stretches(found[i]).end; ++index)
          units.push_back({i, head, index});
    const std::int64_t rows = most_rows(), size = rows * (wide() + 2);
    std::vector<float> memory(units.size() * static_cast<std::size_t>(size));
    const auto part_of = [&](std::size_t unit) {
      float* const at = memory.data() + unit * static_cast<std::size_t>(size);
      return Part{at, at + rows, {at + 2 * rows, wide()}};
    };
    shared_out(threads, units.size(), [&](std::size_t i) {
      const Unit& unit = units[i];
      const Room room(*this);
      take_queries(found[unit.tile], unit.head, room.queries);
      attend(found[unit.tile], unit.head, unit.stretch, room, part_of(i));
    });
    for (std::size_t i = 0; i < units.size();) {
      const Unit& first = units[i];
      const Room room(*this);
      clear(room.whole, rows_of(found[first.tile]));
      for (; i < units.size() && units[i].tile == first.tile && units[i].head == first.head; ++i)
        join_all(found[first.tile], room.whole, part_of(i));
      finish(found[first.tile], first.head, room.whole);
    }
  }

  // Calls work(i) for each i, on so many threads; which one gets which is left to their speed.
  template <class Work>
  static void shared_out(int threads, std::size_t count, const Work& work) {
    std::atomic<std::size_t> next{0};
    in_parallel(threads, [&](int, int) {
      for (std::size_t i; (i = next.fetch_add(1)) < count;) work(i);
    });
  }

  void run() const {
    const std::vector<Tile> found = tiles();
    std::int64_t products = 0;
    for (const Tile& tile : found) products += rows_of(tile) * (seen_by(tile).end - seen_by(tile).begin);
    const int threads = threads_for(products * heads() * (depth() + width()));
    in_parallel(tokens() < threads ? 1 : threads, [&](int index, int count) {
      const Share mine(tokens(), index, count);
      keep(mine.begin, mine.end);
    });
    const std::size_t jobs = found.size() * static_cast<std::size_t>(heads());
    if (threads > 1 && jobs < 4 * static_cast<std::size_t>(threads)) return by_stretches(found, threads);
    shared_out(threads, jobs, [&](std::size_t i) {
      const auto count = static_cast<std::size_t>(heads());
      whole_tile(found[i / count], static_cast<std::int64_t>(i % count));
    });
  }
};

}  // namespace
}  // namespace mctl

MCTL_ENTRY std::int32_t aoti_torch_cpu_mctl_paged_attention(AtenTensorHandle query, AtenTensorHandle key,
                                                            AtenTensorHandle value, AtenTensorHandle cache,
                                                            AtenTensorHandle slots_of, AtenTensorHandle tables_of,
                                                            AtenTensorHandle lengths_of, AtenTensorHandle ends_of,
                                                            AtenTensorHandle* sinks_of, std::int64_t layer,
                                                            double scale, std::int64_t window, double softcap,
                                                            AtenTensorHandle* out) {
  using namespace mctl;
  return guarded([&] {
    const View q(query), k(key), v(value), kv(cache);
    for (const View* tensor : {&q, &k, &v}) tensor->require_float(3);
    const std::int64_t t = q.sizes[0], h = q.sizes[1], e = q.sizes[2], g = k.sizes[1], d = v.sizes[2];
    require(k.sizes[0] == t && v.sizes[0] == t && k.sizes[2] == e && v.sizes[1] == g && g > 0 && h % g == 0);
    require(kv.rank == 4 && kv.sizes[2] == g && kv.sizes[3] == kBlock * (e + d) && 0 <= layer && layer < kv.sizes[0]);
    const std::int64_t blocks = kv.sizes[1], stride = blocks * g * kBlock * (e + d);
    require(kv.strides[3] == 1 && (g == 1 || kv.strides[2] == kv.sizes[3]) &&
            (blocks == 1 || kv.strides[1] == g * kv.sizes[3]) && (kv.sizes[0] == 1 || kv.strides[0] == stride));
    const Numbers slots(slots_of, 1), tables(tables_of, 2), lengths(lengths_of, 1), ends(ends_of, 1);
    require(slots.rows == t && tables.rows == lengths.rows && lengths.rows == ends.rows);
    for (std::int64_t i = 0; i < t; ++i) require(slots[i] < blocks * kBlock);
    const float* const sinks = bias_of(sinks_of, h);
    const std::int64_t sizes[] = {t, h, d}, strides[] = {h * d, d, 1};
    const View y = empty(3, sizes, strides, out);
    if (t * h * d == 0) return;
    const auto run = [&]<class Element>(Element* data) {
      PagedAttention<Element>{q,
                              k,
                              v,
                              slots,
                              tables,
                              lengths,
                              ends,
                              sinks,
                              data + layer * stride,
                              blocks,
                              window,
                              static_cast<float>(scale),
                              static_cast<float>(softcap),
                              y}
          .run();
    };
    if (kv.is_bfloat16())
      run(reinterpret_cast<Bfloat16*>(kv.data));
    else if (kv.dtype == aoti_torch_dtype_float32())
      run(kv.data);
    else
      require(false);
  });
}
