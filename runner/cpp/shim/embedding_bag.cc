// embedding_bag: sums, means or maxima of the rows that each bag names.
#include <cstring>

#include "product.h"

namespace mctl::shim {
namespace {

constexpr auto kName = "_embedding_bag";
enum Mode : std::int64_t { kSum, kMean, kMax };

struct Bags {
  const Tensor *weight, *indices, *offsets, *factors;  // factors may be null
  std::int64_t count, mode, padding;

  std::int64_t begin(std::int64_t bag) const {
    return bag < offsets->sizes[0] ? integer(*offsets, bag) : indices->sizes[0];
  }

  static std::int64_t integer(const Tensor& list, std::int64_t at) {
    at *= list.strides[0];
    return list.dtype == 3 ? elements<std::int32_t>(list)[at] : elements<std::int64_t>(list)[at];
  }
};

AOTITorchError check(const Bags& bags, bool last_offset) {
  for (const Tensor* list : {bags.indices, bags.offsets}) {
    if (list->dtype != 3 && list->dtype != 4) return refuse_dtype(kName, list->dtype);
    if (list->rank != 1) return fail("`%s` by indices or offsets of %d axes", kName, list->rank);
  }
  if (bags.weight->rank != 2) return fail("`%s` of a tensor of %d axes", kName, bags.weight->rank);
  if (last_offset && bags.offsets->sizes[0] < 1) return fail("`%s` without an offset", kName);
  if (bags.mode < kSum || bags.mode > kMax) return fail("`%s` in mode %lld", kName, static_cast<long long>(bags.mode));
  if (bags.factors != nullptr) {
    if (bags.mode != kSum) return fail("`%s` with weights of samples in another mode than sum", kName);
    if (same_dtype(kName, *bags.weight, *bags.factors) != kDone) return kFailed;
    if (bags.factors->rank != 1 || bags.factors->sizes[0] != bags.indices->sizes[0])
      return fail("`%s` with %lld weights of samples", kName, static_cast<long long>(bags.factors->count));
  }
  std::int64_t before = 0;
  for (std::int64_t bag = 0; bag <= bags.count; ++bag) {
    const std::int64_t begin = bags.begin(bag);
    if (begin < before || begin > bags.indices->sizes[0] || (bag == 0 && begin != 0))
      return fail("`%s` with the offset %lld at %lld", kName, static_cast<long long>(begin),
                  static_cast<long long>(bag));
    before = begin;
  }
  std::int64_t row = 0;  // the first that there is not
  const auto outside = [&](const auto* at) {
    const auto rows = static_cast<std::uint64_t>(bags.weight->sizes[0]);
    for (std::int64_t i = 0; i < bags.indices->sizes[0]; ++i)
      if (row = at[i * bags.indices->strides[0]]; static_cast<std::uint64_t>(row) >= rows) return true;
    return false;
  };
  const Tensor& indices = *bags.indices;
  if (indices.dtype == 3 ? outside(elements<std::int32_t>(indices)) : outside(elements<std::int64_t>(indices)))
    return fail("`%s` of row %lld of %lld", kName, static_cast<long long>(row),
                static_cast<long long>(bags.weight->sizes[0]));
  return kDone;
}

// Adds rows to the sums, some at a time; their elements lie side by side. How many there are without the padding.
std::int64_t add_rows(const Bags& bags, std::int64_t begin, std::int64_t end, float* sums) {
  constexpr std::int64_t kAtOnce = 16;
  const float* rows[kAtOnce];
  float factors[kAtOnce];
  std::int64_t size = 0, have = 0;
  const std::int64_t columns = bags.weight->sizes[1];
  for (std::int64_t i = begin; i < end; ++i) {
    const std::int64_t row = Bags::integer(*bags.indices, i);
    if (row == bags.padding) continue;
    rows[have] = elements<float>(*bags.weight) + row * bags.weight->strides[0];
    factors[have] = bags.factors != nullptr ? elements<float>(*bags.factors)[i * bags.factors->strides[0]] : 1;
    ++size;
    if (++have < kAtOnce) continue;
    kernels().add_rows(rows, factors, have, columns, sums);
    have = 0;
  }
  kernels().add_rows(rows, factors, have, columns, sums);
  return size;
}

// sums[j] = what the bag's rows give in column j, and, of maxima, the rows that they are of; how many rows there are.
template <class E>
std::int64_t add_up(const Bags& bags, std::int64_t bag, Sum<E>* sums, std::int64_t* which) {
  using T = Sum<E>;
  const std::int64_t columns = bags.weight->sizes[1], step = bags.weight->strides[1];
  std::int64_t size = 0;
  std::fill(sums, sums + columns, T(0));
  if (bags.mode == kMax) std::fill(which, which + columns, -1);
  const auto row_of = [&](std::int64_t row) { return elements<E>(*bags.weight) + row * bags.weight->strides[0]; };
  std::int64_t i = bags.begin(bag);
  const std::int64_t end = bags.begin(bag + 1);
  if constexpr (std::is_same_v<E, float>)
    if (bags.mode != kMax && step == 1) {
      size = add_rows(bags, i, end, sums);
      i = end;
    }
  for (; i < end; ++i) {
    if (i + kAhead < end) __builtin_prefetch(row_of(Bags::integer(*bags.indices, i + kAhead)));
    const std::int64_t row = Bags::integer(*bags.indices, i);
    if (row == bags.padding) continue;
    const E* const from = row_of(row);
    if (bags.mode == kMax) {
      for (std::int64_t j = 0; j < columns; ++j)
        if (const T value = cast<T>(from[j * step]); size == 0 || value > sums[j]) sums[j] = value, which[j] = row;
    } else if (bags.factors != nullptr) {
      const T factor = cast<T>(elements<E>(*bags.factors)[i * bags.factors->strides[0]]);
      for (std::int64_t j = 0; j < columns; ++j) sums[j] += cast<T>(from[j * step]) * factor;
    } else if (step == 1) {
      for (std::int64_t j = 0; j < columns; ++j) sums[j] += cast<T>(from[j]);
    } else {
      for (std::int64_t j = 0; j < columns; ++j) sums[j] += cast<T>(from[j * step]);
    }
    ++size;
  }
  if (bags.mode == kMean && size > 0)
    for (std::int64_t j = 0; j < columns; ++j) sums[j] /= static_cast<T>(size);
  return size;
}

template <class E>
AOTITorchError fill(const Bags& bags, const Tensor& out, const Tensor& of_index, const Tensor& sizes,
                    const Tensor& most) {
  const std::int64_t columns = bags.weight->sizes[1];
  const auto put = [](const Tensor& list, std::int64_t at, std::int64_t value, std::int64_t count = 1) {
    if (list.dtype == 3)
      std::fill_n(elements<std::int32_t>(list) + at, count, static_cast<std::int32_t>(value));
    else
      std::fill_n(elements<std::int64_t>(list) + at, count, value);
  };
  const int threads = threads_for(static_cast<double>(bags.indices->count) * static_cast<double>(columns) * 8);
  const Scratch scratch(threads * columns, sizeof(Sum<E>)), rows(threads * columns, sizeof(std::int64_t));
  if (!scratch || !rows) return kFailed;
  share_out(threads, bags.count, [&](std::int64_t bag, int thread) {
    auto* const sums = scratch.at<Sum<E>>(thread * columns);
    auto* const which = rows.at<std::int64_t>(thread * columns);
    put(sizes, bag, add_up<E>(bags, bag, sums, which));
    for (std::int64_t j = 0; j < columns; ++j) elements<E>(out)[bag * columns + j] = cast<E>(sums[j]);
    for (std::int64_t j = 0; bags.mode == kMax && j < columns; ++j) put(most, bag * columns + j, which[j]);
    put(of_index, bags.begin(bag), bag, bags.begin(bag + 1) - bags.begin(bag));
  });
  return kDone;
}

}  // namespace

MCTL_EXPORT AOTITorchError aoti_torch_cpu__embedding_bag(Handle weight, Handle indices, Handle offsets, std::int32_t,
                                                         std::int64_t mode, std::int32_t, Handle* factors,
                                                         std::int32_t last_offset, std::int64_t padding, Handle* result,
                                                         Handle* of_index, Handle* sizes, Handle* most) {
  Bags bags{find(weight), find(indices), find(offsets), nullptr, 0, mode, padding};
  if (bags.weight == nullptr || bags.indices == nullptr || bags.offsets == nullptr) return kFailed;
  if (factors != nullptr && (bags.factors = find(*factors)) == nullptr) return kFailed;
  if (bags.offsets->rank == 1) bags.count = bags.offsets->sizes[0] - (last_offset != 0 ? 1 : 0);
  if (check(bags, last_offset != 0) != kDone) return kFailed;
  AOTITorchError done = kFailed;
  const bool known = with_float_type(bags.weight->dtype, [&]<class E>(E*) {
    const std::int64_t shape[] = {bags.count, bags.weight->sizes[1]}, none = 0;
    const std::int32_t dtype = bags.indices->dtype;
    Handle made[4] = {};
    bool have = make_rows(2, shape, bags.weight->dtype, &made[0]) == kDone;
    have = have && make_rows(1, bags.indices->sizes, dtype, &made[1]) == kDone;
    have = have && make_rows(1, shape, dtype, &made[2]) == kDone;
    have = have && make_rows(mode == kMax ? 2 : 1, mode == kMax ? shape : &none, dtype, &made[3]) == kDone;
    if (have) {
      std::memset(find(made[1])->data(), 0, static_cast<std::size_t>(bags.indices->count * bags.indices->item()));
      done = fill<E>(bags, *find(made[0]), *find(made[1]), *find(made[2]), *find(made[3]));
    }
    if (done != kDone) {
      for (Handle handle : made)
        if (handle != nullptr) remove(handle);
      return;
    }
    *result = made[0];
    *of_index = made[1];
    *sizes = made[2];
    *most = made[3];
  });
  return known ? done : refuse_dtype(kName, bags.weight->dtype);
}

}  // namespace mctl::shim
