// Attention as torch's `scaled_dot_product_attention` calls it on a CPU: without dropout, heads of one size; several
// heads of queries may share one of keys and values.
//
// For each head, keys and values are packed once, then blocks of rows of the queries go through: scores, softmax,
// product.
#include <cmath>

#include "product.h"

namespace mctl::shim {
namespace {

constexpr std::int64_t kBlock = 48;  // rows of queries at a time: their scores stay in the cache

template <class E>
class Attention {
 public:
  using T = Sum<E>;

  Attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor* mask, bool causal, double scale,
            const Tensor& out, const Tensor& logs)
      : q_(q),
        k_(k),
        v_(v),
        out_(out),
        logs_(logs),
        mask_(mask),
        causal_(causal),
        scale_(static_cast<T>(scale)),
        tiles_(tiles_for<T>()) {
    for (std::int32_t axis = 0; mask != nullptr && axis < mask->rank; ++axis)
      mask_strides_[4 - mask->rank + axis] = mask->sizes[axis] == 1 ? 0 : mask->strides[axis];
  }

  AOTITorchError run() const {
    const std::int64_t heads = q_.sizes[0] * q_.sizes[1], blocks = (rows() + kBlock - 1) / kBlock;
    if (heads == 0 || rows() == 0) return kDone;
    const int threads = threads_for(static_cast<double>(heads * rows()) * static_cast<double>(keys() * depth()));
    const std::int64_t parts = heads >= threads ? 1 : std::min<std::int64_t>(blocks, threads);
    std::int64_t each = 0;
    const bool fits = !__builtin_mul_overflow(wide(keys()), depth(), &each) &&
                      !__builtin_add_overflow(each, keys() * wide(depth()) + kBlock * wide(keys()), &each) &&
                      !__builtin_add_overflow(each, kBlock * (depth() + wide(depth())), &each);
    const Scratch scratch(fits ? each : -1, threads * std::int64_t{sizeof(T)});
    if (!scratch) return kFailed;
    share_out(threads, heads * parts, [&](std::int64_t job, int thread) {
      T* const keys_to = scratch.at<T>(each * thread);
      T* const values_to = keys_to + wide(keys()) * depth();
      T* const rest = values_to + keys() * wide(depth());
      const std::int64_t head = job / parts, part = job % parts;
      pack(tensor(k_, head, true), keys(), depth(), keys_to);
      pack(tensor(v_, head, false), depth(), keys(), values_to);
      for (std::int64_t block = blocks * part / parts; block < blocks * (part + 1) / parts; ++block)
        some(head, block * kBlock, std::min((block + 1) * kBlock, rows()), keys_to, values_to, rest);
    });
    return kDone;
  }

 private:
  std::int64_t rows() const { return q_.sizes[2]; }
  std::int64_t keys() const { return k_.sizes[2]; }
  std::int64_t depth() const { return q_.sizes[3]; }
  std::int64_t wide(std::int64_t count) const { return (count + tiles_.columns - 1) / tiles_.columns * tiles_.columns; }

  Strided<E> tensor(const Tensor& of, std::int64_t head, bool turned) const {
    const std::int64_t b = head / q_.sizes[1], h = head % q_.sizes[1] * of.sizes[1] / q_.sizes[1];
    E* const data = elements<E>(of) + b * of.strides[0] + h * of.strides[1];
    return turned ? Strided<E>{data, of.strides[3], of.strides[2]} : Strided<E>{data, of.strides[2], of.strides[3]};
  }

  void pack(Strided<E> from, std::int64_t columns, std::int64_t k, T* to) const {
    pack_panels(Strided<const E>{from.data, from.row, from.column}, k, columns, tiles_.columns, to);
  }

  void product(std::int64_t count, std::int64_t k, const T* a, std::int64_t a_stride, const T* panels,
               std::int64_t panel_rows, std::int64_t columns, T* out, std::int64_t out_stride) const {
    for (std::int64_t j = 0; j < columns; j += tiles_.columns, panels += panel_rows * tiles_.columns)
      multiply_panel(tiles_, count, k, a, a_stride, panels, tiles_.columns, out + j, out_stride);
  }

  // scores * scale + mask of one row.
  void add_mask(std::int64_t head, std::int64_t row, std::int64_t seen, T* scores) const {
    const std::int64_t from =
        head / q_.sizes[1] * mask_strides_[0] + head % q_.sizes[1] * mask_strides_[1] + row * mask_strides_[2];
    const auto add = [&]<class M>(const M* added) {
      for (std::int64_t s = 0; s < seen; ++s) scores[s] = scores[s] * scale_ + cast<T>(added[s * mask_strides_[3]]);
    };
    if (mask_->dtype == q_.dtype)
      add(elements<E>(*mask_) + from);
    else
      add(elements<float>(*mask_) + from);
  }

  // Rows [begin, end) of one head.
  void some(std::int64_t head, std::int64_t begin, std::int64_t end, const T* packed_keys, const T* packed_values,
            T* scores) const {
    const std::int64_t count = end - begin, stride = wide(keys()), seen = causal_ ? std::min(end, keys()) : keys();
    T *const queries = scores + kBlock * stride, *const results = queries + kBlock * depth();
    const Strided<E> from = tensor(q_, head, false), to = tensor(out_, head, false);
    for (std::int64_t i = 0; i < count; ++i) pack_row(from(begin + i, 0), from.column, depth(), queries + i * depth());
    product(count, depth(), queries, depth(), packed_keys, depth(), seen, scores, stride);
    T* const logs = elements<T>(logs_) + head / q_.sizes[1] * logs_.strides[0] + head % q_.sizes[1] * logs_.strides[1];
    T parts[kBlock];
    for (std::int64_t i = 0; i < count; ++i) {
      T* const mine = scores + i * stride;
      if (mask_ != nullptr) add_mask(head, begin + i, seen, mine);
      for (std::int64_t s = begin + i + 1; causal_ && s < seen; ++s) mine[s] = -INFINITY;
      parts[i] = softmax(mine, seen, mask_ != nullptr ? T(1) : scale_, &logs[(begin + i) * logs_.strides[2]]);
    }
    product(count, seen, scores, stride, packed_values, keys(), depth(), results, wide(depth()));
    for (std::int64_t i = 0; i < count; ++i)
      for (std::int64_t d = 0; d < depth(); ++d) *to(begin + i, d) = cast<E>(results[i * wide(depth()) + d] * parts[i]);
  }

  // e^(scale * score - largest) in place; returns what they have to be multiplied by. A row that looks at nothing gives
  // zeros, as torch's does.
  static T softmax(T* scores, std::int64_t count, T scale, T* log) {
    const T most = largest(scores, count, scale);
    const T base = most == -INFINITY ? T(0) : most, sum = exponentials(scores, count, scale, base);
    *log = base + std::log(sum);
    return sum == T(0) ? T(0) : T(1) / sum;
  }

  const Tensor &q_, &k_, &v_, &out_, &logs_;
  const Tensor* mask_;
  std::int64_t mask_strides_[4] = {};
  bool causal_;
  T scale_;
  const Tiles<T>& tiles_;
};

constexpr auto kName = "_scaled_dot_product_flash_attention_for_cpu";

AOTITorchError check(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor* mask) {
  for (const Tensor* tensor : {&q, &k, &v}) {
    if (tensor->rank != 4) return fail("`%s` of a tensor of %d axes, not 4", kName, tensor->rank);
    if (same_dtype(kName, q, *tensor) != kDone) return kFailed;
  }
  bool fit = k.sizes[1] == v.sizes[1] && k.sizes[2] == v.sizes[2];
  for (const Tensor* tensor : {&k, &v})
    for (const int axis : {0, 3}) fit = fit && tensor->sizes[axis] == q.sizes[axis];
  fit = fit && (k.sizes[1] == 0 ? q.sizes[1] == 0 : q.sizes[1] % k.sizes[1] == 0);
  if (!fit) return fail("`%s` of queries, keys and values whose shapes do not fit", kName);
  if (mask == nullptr) return kDone;
  if (mask->dtype != q.dtype && mask->dtype != 6) return same_dtype(kName, q, *mask);
  if (mask->rank != 2 && mask->rank != 4) return fail("`%s` with a mask of %d axes, not 2 or 4", kName, mask->rank);
  const std::int64_t wanted[] = {q.sizes[0], q.sizes[1], q.sizes[2], k.sizes[2]};
  for (std::int32_t axis = 0; axis < mask->rank; ++axis)
    if (const std::int64_t size = wanted[4 - mask->rank + axis]; mask->sizes[axis] != size && mask->sizes[axis] != 1)
      return fail("`%s` with a mask whose axis %d has the size %lld, not %lld", kName, axis,
                  static_cast<long long>(mask->sizes[axis]), static_cast<long long>(size));
  return kDone;
}

}  // namespace

MCTL_EXPORT AOTITorchError aoti_torch_cpu__scaled_dot_product_flash_attention_for_cpu(
    Handle query, Handle key, Handle value, double dropout, std::int32_t causal, Handle* mask_handle,
    const double* scale, Handle* result, Handle* logs) {
  const Tensor *q = find(query), *k = find(key), *v = find(value);
  const Tensor* mask = mask_handle != nullptr ? find(*mask_handle) : nullptr;
  if (q == nullptr || k == nullptr || v == nullptr || (mask_handle != nullptr && mask == nullptr)) return kFailed;
  if (dropout != 0) return fail("mctl's shim has no `%s` with dropout", kName);
  if (check(*q, *k, *v, mask) != kDone) return kFailed;
  AOTITorchError done = kFailed;
  const bool known = with_float_type(q->dtype, [&]<class E>(E*) {
    const std::int64_t h = q->sizes[1], log_strides[] = {q->sizes[2] * h, 1, h};
    std::int64_t strides[kMaxRank];
    dense(*q, strides);
    Handle made = nullptr, made_logs = nullptr;
    if (make_empty(4, q->sizes, strides, q->dtype, &made) != kDone) return;
    if (make_empty(3, q->sizes, log_strides, std::is_same_v<E, double> ? 7 : 6, &made_logs) == kDone) {
      const double factor = scale != nullptr ? *scale : 1 / std::sqrt(static_cast<double>(q->sizes[3]));
      done = Attention<E>(*q, *k, *v, mask, causal != 0, factor, *find(made), *find(made_logs)).run();
      if (done != kDone) remove(made_logs);
    }
    if (done != kDone) {
      remove(made);
      return;
    }
    *result = made;
    *logs = made_logs;
  });
  return known ? done : refuse_dtype(kName, q->dtype);
}

}  // namespace mctl::shim
