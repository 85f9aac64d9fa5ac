// mm, bmm, addmm and baddbmm.
#include "product.h"

#include <cmath>

namespace mctl::shim {
namespace {

using shim::pack_panel, shim::pack_row;

// May two of them be read at once, as pairs?
bool lies_as_pairs(const Bfloat16* data) { return reinterpret_cast<std::uintptr_t>(data) % sizeof(Pair) == 0; }

Pair pair(Bfloat16 low, Bfloat16 high) { return Pair{low.bits} | Pair{high.bits} << 16; }

// Numbers in an element of a product.
template <class Element>
constexpr std::int64_t kTaken = std::is_same_v<Element, Pair> ? 2 : 1;

void pack_row(const Bfloat16* from, std::int64_t step, std::int64_t count, Pair* to) {
  const std::int64_t pairs = count / 2;
  for (std::int64_t l = 0; l < pairs; ++l) to[l] = pair(from[2 * l * step], from[(2 * l + 1) * step]);
  if (count % 2 != 0) to[pairs] = pair(from[2 * pairs * step], Bfloat16(0.0f));
}

// Panels of pairs: of k rows two at a time.
void pack_panel(Strided<const Bfloat16> from, std::int64_t k, std::int64_t columns, std::int64_t width, Pair* to) {
  const std::int64_t pairs = k / 2, half = width / 2;
  const bool full = columns == width, in_columns = from.column % 2 == 0 && lies_as_pairs(from.data);
  if (full && from.column == 1) {
    for (std::int64_t j = 0; j < width; j += half) kernels().zip(&from(0, j)->bits, from.row, pairs, to + j, width);
  } else if (full && from.row == 1 && in_columns) {
    for (std::int64_t j = 0; j < width; j += half) kernels().turn(from(0, j), from.column / 2, pairs, to + j, width);
  } else {
    for (std::int64_t l = 0; l < pairs; ++l) {
      for (std::int64_t j = 0; j < columns; ++j) to[l * width + j] = pair(*from(2 * l, j), *from(2 * l + 1, j));
      std::fill(to + l * width + columns, to + (l + 1) * width, Pair{0});
    }
  }
  to += pairs * width;
  if (k % 2 == 0) return;
  for (std::int64_t j = 0; j < width; ++j) to[j] = j < columns ? pair(*from(k - 1, j), Bfloat16(0.0f)) : Pair{0};
}

// One thread's, or one team's, way through a product: what cannot be read where it lies is packed first.
template <class E, class Element>
class Run {
 public:
  using T = Sum<E>;

  explicit Run(const Product<E>& product)
      : product_(product),
        tiles_(tiles_for<T, Element>()),
        k_((product.k + kTaken<Element> - 1) / kTaken<Element>),
        panels_((product.n + tiles_.columns - 1) / tiles_.columns),
        blocks_((product.m + tiles_.rows - 1) / tiles_.rows),
        rows_in_place_(in_place(product.a, product.next_a) && !collides(product.a.row)),
        turned_(sizeof(Element) == 4 && product.m <= tiles_.rows && in_place(turned(product.b), product.next_b)),
        panels_in_place_(turned_ ||
                         (kSame && product.b.column == 1 && (product.m <= 4 * tiles_.rows || near(product.b.row)))) {}

  // Bytes of scratch memory; negative if there are more than can be counted.
  std::int64_t bytes() const {
    std::int64_t rows = 0, columns = 0, whole = 0;
    const bool fits = (rows_in_place_ || !__builtin_mul_overflow(product_.m, row_stride(), &rows)) &&
                      !__builtin_mul_overflow(packed_panels() * tiles_.columns, k_, &columns) &&
                      !__builtin_add_overflow(rows, columns, &whole) &&
                      !__builtin_mul_overflow(whole, std::int64_t{sizeof(Element)}, &whole);
    return fits ? whole : -1;
  }

  void one(std::int64_t number, Element* scratch, int threads) {
    a_ = product_.a;
    b_ = product_.b;
    a_.data += number * product_.next_a;
    b_.data += number * product_.next_b;
    self_ = product_.self;
    out_ = product_.out;
    if (product_.beta != T(0)) self_.data += number * product_.next_self;
    out_.data += number * product_.next_out;
    rows_ = scratch + packed_panels() * tiles_.columns * k_;
    columns_ = scratch;
    if (!rows_in_place_) pack_rows(threads);
    const std::int64_t first = panels_ - packed_panels();
    share_out(threads, packed_panels(), [&](std::int64_t i, int) {
      const std::int64_t panel = first + i;
      pack_panel(Strided<const E>{b_(0, panel * tiles_.columns), b_.row, b_.column}, product_.k, columns_of(panel),
                 tiles_.columns, packed(panel));
    });
    share_out(threads, panels_ * blocks_, [&](std::int64_t part, int) { block(part / blocks_, part % blocks_); });
  }

 private:
  static constexpr bool kSame = std::is_same_v<E, Element>;

  static Strided<const E> turned(const Strided<const E>& of) { return {of.data, of.column, of.row}; }

  // Can the matrix's rows be read as elements of a product where they lie?
  bool in_place(const Strided<const E>& of, std::int64_t next) const {
    if (of.column != 1 && product_.k != 1) return false;
    if constexpr (kTaken<Element> == 2)
      return product_.k % 2 == 0 && of.row % 2 == 0 && next % 2 == 0 && lies_as_pairs(of.data);
    return kSame;
  }

  // Long rows that all begin in the same lines of the cache.
  bool collides(std::int64_t stride) const { return product_.k >= 1024 && stride * sizeof(E) % 4096 == 0; }

  // Is all of b, with rows so far apart, small enough to be read again and again where it lies?
  bool near(std::int64_t stride) const {
    return static_cast<double>(product_.k) * static_cast<double>(stride) * sizeof(E) <= 1 << 16;
  }

  std::int64_t row_stride() const { return k_ + 64 / static_cast<std::int64_t>(sizeof(Element)); }
  std::int64_t columns_of(std::int64_t panel) const {
    return std::min<std::int64_t>(tiles_.columns, product_.n - panel * tiles_.columns);
  }
  // The last ones; a panel that is not full cannot be read in place.
  std::int64_t packed_panels() const { return panels_in_place_ ? (product_.n % tiles_.columns != 0 ? 1 : 0) : panels_; }
  Element* packed(std::int64_t panel) const {
    return columns_ + (panel - (panels_ - packed_panels())) * tiles_.columns * k_;
  }

  void pack_rows(int threads) {
    std::int64_t done = 0;  // of k
    if constexpr (std::is_same_v<E, float>) {
      const std::int64_t width = tiles_.columns / 2, blocks = a_.row == 1 ? product_.k / width : 0;
      share_out(threads, blocks, [&](std::int64_t i, int) {
        kernels().turn(a_(0, i * width), a_.column, product_.m, rows_ + i * width, row_stride());
      });
      done = blocks * width;
    }
    share_out(threads, product_.m, [&](std::int64_t i, int) {
      pack_row(a_(i, done), a_.column, product_.k - done, rows_ + i * row_stride() + done);
    });
  }

  void block(std::int64_t panel, std::int64_t number) {
    const std::int64_t row = product_.m * number / blocks_, rows = product_.m * (number + 1) / blocks_ - row;
    const std::int64_t column = panel * tiles_.columns, columns = columns_of(panel);
    const Element *a = rows_ + row * row_stride(), *b = packed(panel);
    std::int64_t a_stride = row_stride(), b_stride = tiles_.columns;
    if (rows_in_place_) a = as_elements(a_(row, 0)), a_stride = a_.row / kTaken<Element>;
    auto tile = tiles_(rows);
    if (panel < panels_ - packed_panels()) {
      b = as_elements(b_(0, column));
      b_stride = (turned_ ? b_.column : b_.row) / kTaken<Element>;
      if (turned_) tile = tiles_.turned[rows - 1];
    }
    if constexpr (std::is_same_v<E, T>) {
      if (columns == tiles_.columns && out_.column == 1 && product_.alpha == T(1) && product_.beta == T(0))
        return tile(k_, a, a_stride, b, b_stride, out_(row, column), out_.row);
    }
    alignas(64) T sums[Tiles<T>::kMost * kMostColumns];
    tile(k_, a, a_stride, b, b_stride, sums, tiles_.columns);
    if constexpr (std::is_same_v<E, Bfloat16>) {
      if (out_.column == 1 && product_.alpha == T(1) && product_.beta == T(0)) {
        for (std::int64_t i = 0; i < rows; ++i)
          kernels().narrow(sums + i * tiles_.columns, columns, &out_(row + i, column)->bits);
        return;
      }
    }
    for (std::int64_t i = 0; i < rows; ++i)
      for (std::int64_t j = 0; j < columns; ++j) {
        T value = product_.alpha * sums[i * tiles_.columns + j];
        if (product_.beta != T(0)) value += product_.beta * cast<T>(*self_(row + i, column + j));
        *out_(row + i, column + j) = cast<E>(value);
      }
  }

  static const Element* as_elements(const E* data) { return reinterpret_cast<const Element*>(data); }

  const Product<E>& product_;
  const Tiles<T, Element>& tiles_;
  std::int64_t k_, panels_, blocks_;  // k_: in elements of the tiles
  bool rows_in_place_, turned_, panels_in_place_;
  Strided<const E> a_{}, b_{}, self_{};
  Strided<E> out_{};
  Element *rows_ = nullptr, *columns_ = nullptr;
};

// Many products are shared out among the threads, each of few is.
template <class Element, class E>
AOTITorchError run_as(const Product<E>& product) {
  const int threads = threads_for(static_cast<double>(product.count) * static_cast<double>(product.m) *
                                  static_cast<double>(product.n) * static_cast<double>(product.k) / 2);
  const bool across = threads > 1 && product.count >= threads;
  const Run<E, Element> way(product);
  const Scratch scratch(across ? threads : 1, way.bytes());
  if (!scratch) return kFailed;
  const std::int64_t each = way.bytes() / std::int64_t{sizeof(Element)};
  share_out(across ? threads : 1, product.count, [&](std::int64_t i, int thread) {
    Run<E, Element>(way).one(i, scratch.at<Element>(thread * each), across ? 1 : threads);
  });
  return kDone;
}

}  // namespace

template <class E>
AOTITorchError Product<E>::run() const {
  if (count == 0 || m == 0 || n == 0) return kDone;
  if constexpr (std::is_same_v<E, Bfloat16>)
    if (kernels().pairs.rows > 0) return run_as<Pair>(*this);
  return run_as<Sum<E>>(*this);
}

namespace {

// The number as sums are; integers have no others.
template <class T>
AOTITorchError factor(const char* name, double given, T* result) {
  if constexpr (std::is_same_v<T, std::uint64_t>) {
    if (given != std::trunc(given) || std::fabs(given) > 0x1p53)
      return fail("`%s` of integers with the factor %g", name, given);
    *result = static_cast<T>(static_cast<std::int64_t>(given));
  } else {
    *result = static_cast<T>(given);
  }
  return kDone;
}

AOTITorchError shapes_differ(const char* name, std::int64_t one, std::int64_t other) {
  return fail("`%s` of shapes that do not fit: %lld and %lld", name, static_cast<long long>(one),
              static_cast<long long>(other));
}

// Do they lie in the same memory? Bytes from the first element to the last, which may skip some.
bool overlap(const Tensor& one, const Tensor& other) {
  const auto span = [](const Tensor& tensor) {
    std::int64_t last = 0;
    for (std::int32_t axis = 0; axis < tensor.rank; ++axis) last += (tensor.sizes[axis] - 1) * tensor.strides[axis];
    return (last + 1) * tensor.item();
  };
  return one.count > 0 && other.count > 0 && one.data() < other.data() + span(other) &&
         other.data() < one.data() + span(one);
}

// out = alpha * one two + beta * self, over matrices or, with a leading axis, over several.
AOTITorchError product(const char* name, std::int32_t rank, Handle out_handle, Handle self_handle, Handle one,
                       Handle two, double beta, double alpha) {
  const Tensor *out = find(out_handle), *a = find(one), *b = find(two);
  const Tensor* self = self_handle != nullptr ? find(self_handle) : out;
  if (out == nullptr || a == nullptr || b == nullptr || self == nullptr) return kFailed;
  for (const Tensor* tensor : {out, a, b})
    if (tensor->rank != rank) return fail("`%s` of a tensor of %d axes, not %d", name, tensor->rank, rank);
  for (const Tensor* tensor : {a, b, self})
    if (same_dtype(name, *out, *tensor) != kDone) return kFailed;
  const std::int32_t row = rank - 2, column = rank - 1;
  if (a->sizes[column] != b->sizes[row]) return shapes_differ(name, a->sizes[column], b->sizes[row]);
  if (rank == 3 && a->sizes[0] != b->sizes[0]) return shapes_differ(name, a->sizes[0], b->sizes[0]);
  const std::int64_t wanted[3] = {a->sizes[0], a->sizes[row], b->sizes[column]};
  std::int64_t steps[3] = {};  // of self, broadcast
  for (std::int32_t axis = 0; axis < rank; ++axis) {
    const std::int64_t size = wanted[axis + 3 - rank];
    if (out->sizes[axis] != size) return shapes_differ(name, out->sizes[axis], size);
    const std::int32_t at = axis - (rank - self->rank);
    if (at < 0) continue;
    if (self->sizes[at] != size && self->sizes[at] != 1) return shapes_differ(name, self->sizes[at], size);
    steps[axis] = self->sizes[at] == 1 ? 0 : self->strides[at];
  }
  if (self->rank > rank) return fail("`%s` of a tensor of %d axes, not %d", name, self->rank, rank);
  if (overlap(*out, *a) || overlap(*out, *b)) return fail("`%s` into one of its factors", name);
  AOTITorchError result = kFailed;
  const bool known = with_factor_type(out->dtype, [&]<class E>(E*) {
    Product<E> job{};
    if (factor(name, alpha, &job.alpha) != kDone || factor(name, beta, &job.beta) != kDone) return;
    const bool many = rank == 3;
    job.count = many ? wanted[0] : 1;
    job.m = wanted[1];
    job.n = wanted[2];
    job.k = a->sizes[column];
    job.a = {elements<E>(*a), a->strides[row], a->strides[column]};
    job.b = {elements<E>(*b), b->strides[row], b->strides[column]};
    job.self = {elements<E>(*self), steps[row], steps[column]};
    job.out = {elements<E>(*out), out->strides[row], out->strides[column]};
    job.next_a = many ? a->strides[0] : 0;
    job.next_b = many ? b->strides[0] : 0;
    job.next_self = many ? steps[0] : 0;
    job.next_out = many ? out->strides[0] : 0;
    result = job.run();
  });
  return known ? result : refuse_dtype(name, out->dtype);
}

}  // namespace

MCTL_EXPORT AOTITorchError aoti_torch_cpu_mm_out(Handle out, Handle self, Handle other) {
  return product("mm", 2, out, nullptr, self, other, 0, 1);
}

MCTL_EXPORT AOTITorchError aoti_torch_cpu_bmm_out(Handle out, Handle self, Handle other) {
  return product("bmm", 3, out, nullptr, self, other, 0, 1);
}

MCTL_EXPORT AOTITorchError aoti_torch_cpu_addmm_out(Handle out, Handle self, Handle one, Handle two, double beta,
                                                    double alpha) {
  return product("addmm", 2, out, self, one, two, beta, alpha);
}

MCTL_EXPORT AOTITorchError aoti_torch_cpu_baddbmm_out(Handle out, Handle self, Handle one, Handle two, double beta,
                                                      double alpha) {
  return product("baddbmm", 3, out, self, one, two, beta, alpha);
}

}  // namespace mctl::shim
