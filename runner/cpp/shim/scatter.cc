// scatter and scatter_reduce along an axis: out[.., index, ..] of self, and what is put or added there.
#include <cmath>
#include <string_view>

#include "operators.h"

namespace mctl::shim {
namespace {

enum class Reduction { put, sum, prod, mean, amax, amin };

AOTITorchError reduction_of(std::string_view name, Reduction* result) {
  constexpr std::string_view names[] = {"", "sum", "prod", "mean", "amax", "amin"};
  for (int i = 1; i < 6; ++i)
    if (name == names[i]) return *result = static_cast<Reduction>(i), kDone;
  return fail("`scatter_reduce` by %.*s", static_cast<int>(name.size()), name.data());
}

// A NaN stays, as torch has it.
template <class T>
T greater(T one, T other) {
  return other > one || other != other ? other : one;
}
template <class T>
T lesser(T one, T other) {
  return other < one || other != other ? other : one;
}

// Integers wrap round.
template <class E>
using Arithmetic = std::conditional_t<is_narrow<E>, float, std::conditional_t<std::is_integral_v<E>, std::int64_t, E>>;

template <class E>
E combined(E one, E other, Reduction reduction) {
  using T = Arithmetic<E>;
  const T x = cast<T>(one), y = cast<T>(other);
  switch (reduction) {
    case Reduction::sum:
    case Reduction::mean:
      if constexpr (std::is_integral_v<T>)
        return cast<E>(static_cast<T>(static_cast<std::uint64_t>(x) + static_cast<std::uint64_t>(y)));
      else
        return cast<E>(x + y);
    case Reduction::prod:
      if constexpr (std::is_integral_v<T>)
        return cast<E>(static_cast<T>(static_cast<std::uint64_t>(x) * static_cast<std::uint64_t>(y)));
      else
        return cast<E>(x * y);
    case Reduction::amax:
      return cast<E>(x != x ? x : greater(x, y));
    case Reduction::amin:
      return cast<E>(x != x ? x : lesser(x, y));
    default:
      return other;
  }
}

// What an element begins with that is not to count itself.
template <class E>
E neutral(Reduction reduction) {
  using T = Arithmetic<E>;
  switch (reduction) {
    case Reduction::prod:
      return cast<E>(T(1));
    case Reduction::amax:
      if constexpr (is_narrow<E> || std::is_floating_point_v<E>)
        return cast<E>(static_cast<T>(-INFINITY));
      else
        return std::numeric_limits<E>::min();
    case Reduction::amin:
      if constexpr (is_narrow<E> || std::is_floating_point_v<E>)
        return cast<E>(static_cast<T>(INFINITY));
      else
        return std::numeric_limits<E>::max();
    default:
      return cast<E>(T(0));
  }
}

template <class E>
E divided(E value, std::int64_t count) {
  if constexpr (is_narrow<E>) {
    return cast<E>(static_cast<float>(value) / static_cast<float>(count));
  } else if constexpr (std::is_floating_point_v<E>) {
    return value / static_cast<E>(count);
  } else {
    const auto whole = static_cast<std::int64_t>(value);
    return static_cast<E>(whole / count - (whole % count < 0 ? 1 : 0));  // rounds down
  }
}

// Where one line's elements lie, in each of the tensors.
struct Line {
  std::int64_t size, out_size, out_step, index_step, source_step;
};

template <class E, class I>
bool scatter_line(const Line& line, E* out, const I* index, const E* source, Reduction reduction, bool include_self,
                  std::int64_t* counts) {
  const auto target = [&](std::int64_t i) { return static_cast<std::int64_t>(index[i * line.index_step]); };
  const auto combine = [&](const auto& by) {
    for (std::int64_t i = 0; i < line.size; ++i) {
      E& to = out[target(i) * line.out_step];
      to = by(to, source[i * line.source_step]);
    }
  };
  for (std::int64_t i = 0; i < line.size; ++i)
    if (static_cast<std::uint64_t>(target(i)) >= static_cast<std::uint64_t>(line.out_size))
      return fail("`scatter` to index %lld of an axis of the size %lld", static_cast<long long>(target(i)),
                  static_cast<long long>(line.out_size)),
             false;
  if (reduction == Reduction::put) return combine([](E, E other) { return other; }), true;
  if (!include_self)
    for (std::int64_t i = 0; i < line.size; ++i) out[target(i) * line.out_step] = neutral<E>(reduction);
  if (reduction == Reduction::sum)
    combine([](E one, E other) { return combined(one, other, Reduction::sum); });
  else
    combine([&](E one, E other) { return combined(one, other, reduction); });
  if (reduction != Reduction::mean) return true;
  std::fill(counts, counts + line.out_size, include_self ? 1 : 0);
  for (std::int64_t i = 0; i < line.size; ++i) ++counts[target(i)];
  for (std::int64_t at = 0; at < line.out_size; ++at)
    if (counts[at] > 1) out[at * line.out_step] = divided(out[at * line.out_step], counts[at]);
  return true;
}

AOTITorchError check(const Tensor& out, const Tensor& index, const Tensor& source, std::int32_t axis) {
  if (index.dtype != 3 && index.dtype != 4) return fail("`scatter` by an index of %s", name_of(index.dtype));
  for (const Tensor* tensor : {&index, &source})
    if (std::max(tensor->rank, 1) != std::max(out.rank, 1))
      return fail("`scatter` of tensors of %d and %d axes", out.rank, tensor->rank);
  for (std::int32_t other = 0; other < index.rank; ++other) {
    const std::int64_t size = index.sizes[other];
    const std::int64_t most = other == axis || out.rank == 0 ? size : out.sizes[other];
    if (size > most || size > (source.rank == 0 ? 1 : source.sizes[other]))
      return fail("`scatter` with an index whose axis %d has the size %lld, more than there are", other,
                  static_cast<long long>(size));
  }
  return kDone;
}

// `source` may be broadcast: strides 0.
AOTITorchError scatter(Handle out_handle, Handle self_handle, std::int64_t dim, Handle index_handle,
                       const Tensor* source, Reduction reduction, bool include_self) {
  const Tensor *out = find(out_handle), *self = find(self_handle), *index = find(index_handle);
  if (out == nullptr || self == nullptr || index == nullptr || source == nullptr) return kFailed;
  std::int32_t axis = 0;
  if (find_axis(*self, dim, &axis) != kDone || same_dtype("scatter", *out, *self) != kDone ||
      same_dtype("scatter", *out, *source) != kDone)
    return kFailed;
  if (out->rank != self->rank || !std::equal(out->sizes, out->sizes + out->rank, self->sizes))
    return fail("`scatter` to a tensor of another shape");
  if (out->data() != self->data() && copy(*out, *self) != kDone) return kFailed;
  if (index->count == 0) return kDone;
  if (check(*out, *index, *source, axis) != kDone) return kFailed;
  const Lines lines(*index, axis);
  const std::int64_t one = 1;
  const std::int64_t* const out_strides = out->rank == 0 ? &one : out->strides;
  const std::int64_t* const source_strides = source->rank == 0 && index->rank > 0 ? &one : source->strides;
  const Line line{lines.size(), out->rank == 0 ? 1 : out->sizes[axis], out_strides[axis], lines.step(index->strides),
                  lines.step(source_strides)};
  const Scratch counts(reduction == Reduction::mean ? line.out_size : 0, sizeof(std::int64_t));
  if (!counts) return kFailed;
  bool done = true;
  const bool known = with_type(out->dtype, [&]<class E>(E*) {
    for (std::int64_t number = 0; number < lines.count() && done; ++number) {
      E* const to = elements<E>(*out) + lines.begin(number, out_strides);
      const E* const from = elements<E>(*source) + lines.begin(number, source_strides);
      const std::int64_t at = lines.begin(number, index->strides);
      done = index->dtype == 3 ? scatter_line(line, to, elements<std::int32_t>(*index) + at, from, reduction,
                                              include_self, counts.at<std::int64_t>())
                               : scatter_line(line, to, elements<std::int64_t>(*index) + at, from, reduction,
                                              include_self, counts.at<std::int64_t>());
    }
  });
  if (!known) return refuse_dtype("scatter", out->dtype);
  return done ? kDone : kFailed;
}

}  // namespace

MCTL_EXPORT AOTITorchError aoti_torch_cpu_scatter_reduce_two_out(Handle out, Handle self, std::int64_t dim,
                                                                 Handle index, Handle source, const char* reduce,
                                                                 std::int32_t include_self) {
  Reduction reduction{};
  if (reduction_of(reduce, &reduction) != kDone) return kFailed;
  return scatter(out, self, dim, index, find(source), reduction, include_self != 0);
}

MCTL_EXPORT AOTITorchError aoti_torch_cpu_scatter_src_out(Handle out, Handle self, std::int64_t dim, Handle index,
                                                          Handle source) {
  return scatter(out, self, dim, index, find(source), Reduction::put, true);
}

MCTL_EXPORT AOTITorchError aoti_torch_cpu_scatter_value_out(Handle out_handle, Handle self, std::int64_t dim,
                                                            Handle index_handle, double value) {
  const Tensor *out = find(out_handle), *index = find(index_handle);
  if (out == nullptr || index == nullptr) return kFailed;
  Handle made = nullptr;
  const std::int64_t strides[kMaxRank] = {};
  if (make_empty(index->rank, index->sizes, strides, out->dtype, &made) != kDone) return kFailed;
  AOTITorchError done = kDone;
  const bool known = with_type(out->dtype, [&]<class E>(E*) {
    if (index->count > 0) *elements<E>(*find(made)) = cast<E>(value);
  });
  done = known ? scatter(out_handle, self, dim, index_handle, find(made), Reduction::put, true)
               : refuse_dtype("scatter", out->dtype);
  remove(made);
  return done;
}

}  // namespace mctl::shim
