// index_put by tensors of integers: self[i, :, j] = values, or added to it.
#include "operators.h"

namespace mctl::shim {
namespace {

constexpr auto kName = "index_put";

struct Indexed {
  const Tensor* by[kMaxRank] = {};  // for each axis of self; null: all of it
  std::int32_t axes = 0, first = -1, rank = 0;
  bool together = true;                     // the indexed axes lie side by side
  std::int64_t sizes[kMaxRank], count = 1;  // of all indices, broadcast
};

// Broadcasts the indices' shapes; integers only.
AOTITorchError gather_indices(const Tensor& self, const Handle* indices, std::uint32_t count, Indexed& all) {
  if (count > static_cast<std::uint32_t>(self.rank)) return fail("`%s` with %u indices", kName, count);
  std::int32_t last = -1;
  for (std::uint32_t axis = 0; axis < count; ++axis) {
    if (indices[axis] == nullptr) continue;
    const Tensor* by = all.by[axis] = find(indices[axis]);
    if (by == nullptr) return kFailed;
    if (by->dtype != 3 && by->dtype != 4) return fail("mctl's shim has no `%s` by %s", kName, name_of(by->dtype));
    if (all.first < 0) all.first = static_cast<std::int32_t>(axis);
    all.together = all.together && (last < 0 || last + 1 == static_cast<std::int32_t>(axis));
    last = static_cast<std::int32_t>(axis);
    ++all.axes;
    all.rank = std::max(all.rank, by->rank);
  }
  if (all.axes == 0) return fail("`%s` without an index", kName);
  std::fill(all.sizes, all.sizes + all.rank, 1);
  for (const Tensor* by : all.by)
    for (std::int32_t axis = 0; by != nullptr && axis < by->rank; ++axis) {
      std::int64_t& size = all.sizes[all.rank - by->rank + axis];
      if (by->sizes[axis] != size && by->sizes[axis] != 1 && size != 1)
        return fail("`%s` with indices whose shapes do not fit", kName);
      if (size == 1) size = by->sizes[axis];
    }
  for (std::int32_t axis = 0; axis < all.rank; ++axis) all.count *= all.sizes[axis];
  return kDone;
}

// Element `number` of an index, broadcast.
std::int64_t index_at(const Tensor& by, const Indexed& all, std::int64_t number) {
  std::int64_t at = 0;
  for (std::int32_t axis = all.rank; axis-- > 0; number /= all.sizes[axis]) {
    const std::int32_t own = axis - (all.rank - by.rank);
    if (own >= 0 && by.sizes[own] != 1) at += number % all.sizes[axis] * by.strides[own];
  }
  return by.dtype == 3 ? elements<std::int32_t>(by)[at] : elements<std::int64_t>(by)[at];
}

// Where in self (elements) the indices of `number` lead.
AOTITorchError target(const Tensor& self, const Indexed& all, std::int64_t number, std::int64_t* result) {
  *result = 0;
  for (std::int32_t axis = 0; axis < self.rank; ++axis) {
    if (all.by[axis] == nullptr) continue;
    const std::int64_t given = index_at(*all.by[axis], all, number), size = self.sizes[axis];
    if (given < -size || given >= size)
      return fail("index %lld is out of bounds for axis %d of the size %lld", static_cast<long long>(given), axis,
                  static_cast<long long>(size));
    *result += (given < 0 ? given + size : given) * self.strides[axis];
  }
  return kDone;
}

// The axes that indexing gives, with their strides in self; those of the indices themselves have the stride 0.
Tensor shape_of_result(const Tensor& self, const Indexed& all) {
  Tensor result;
  const auto add_indices = [&] {
    for (std::int32_t axis = 0; axis < all.rank; ++axis) {
      result.sizes[result.rank] = all.sizes[axis];
      result.strides[result.rank++] = 0;
    }
  };
  if (!all.together) add_indices();
  for (std::int32_t axis = 0; axis < self.rank; ++axis) {
    if (all.together && axis == all.first) add_indices();
    if (all.by[axis] != nullptr) continue;
    result.sizes[result.rank] = self.sizes[axis];
    result.strides[result.rank++] = self.strides[axis];
  }
  return result;
}

template <class E>
void put(E& to, E value, bool accumulate) {
  if (!accumulate)
    to = value;
  else if constexpr (is_narrow<E>)
    to = E(static_cast<float>(to) + static_cast<float>(value));
  else if constexpr (std::is_integral_v<E> && !std::is_same_v<E, bool>)
    to = static_cast<E>(static_cast<std::uint64_t>(to) + static_cast<std::uint64_t>(value));
  else
    to = static_cast<E>(to + value);
}

template <class E>
void put_line(E* to, std::int64_t to_step, const E* from, std::int64_t from_step, std::int64_t count, bool accumulate) {
  if (to_step == 1 && from_step == 1)
    for (std::int64_t i = 0; i < count; ++i) put(to[i], from[i], accumulate);
  else
    for (std::int64_t i = 0; i < count; ++i) put(to[i * to_step], from[i * from_step], accumulate);
}

AOTITorchError index_put(const Tensor& self, const Indexed& all, const Tensor& values, bool accumulate) {
  Tensor shape = shape_of_result(self, all);
  if (shape.rank > kMaxRank || values.rank > shape.rank) return fail("`%s` of too many axes", kName);
  const std::int32_t lead = all.together ? all.first : 0;
  std::int64_t from_strides[kMaxRank] = {}, rest = 1, own_strides[kMaxRank], others[kMaxRank];
  for (std::int32_t axis = 0; axis < values.rank; ++axis) {
    const std::int32_t at = shape.rank - values.rank + axis;
    if (values.sizes[axis] != shape.sizes[at] && values.sizes[axis] != 1)
      return fail("`%s` of values whose shape does not fit", kName);
    from_strides[at] = values.sizes[axis] == 1 ? 0 : values.strides[axis];
  }
  for (std::int32_t axis = 0; axis < shape.rank; ++axis) {
    const bool index = axis >= lead && axis < lead + all.rank;
    own_strides[axis] = index ? 0 : shape.strides[axis];
    others[axis] = index ? 1 : shape.sizes[axis];
    rest *= others[axis];
  }
  std::int32_t last = shape.rank;  // the axis along which a line at a time is put
  while (last > 0 && others[last - 1] == 1) --last;
  const std::int64_t line = last == 0 ? 1 : others[last - 1], to_step = last == 0 ? 0 : own_strides[last - 1],
                     from_step = last == 0 ? 0 : from_strides[last - 1];
  AOTITorchError done = kDone;
  const bool known = with_type(self.dtype, [&]<class E>(E*) {
    for (std::int64_t number = 0; number < all.count && rest > 0; ++number) {
      std::int64_t to = 0, from = 0, left = number;
      if (done = target(self, all, number, &to); done != kDone) return;
      for (std::int32_t axis = all.rank; axis-- > 0; left /= all.sizes[axis])
        from += left % all.sizes[axis] * from_strides[lead + axis];
      for (std::int64_t of_line = 0; of_line < rest / line; ++of_line) {
        std::int64_t to_at = to, from_at = from, of = of_line;
        for (std::int32_t axis = last - 1; axis-- > 0; of /= others[axis]) {
          if (others[axis] == 1) continue;
          to_at += of % others[axis] * own_strides[axis];
          from_at += of % others[axis] * from_strides[axis];
        }
        put_line(elements<E>(self) + to_at, to_step, elements<E>(values) + from_at, from_step, line, accumulate);
      }
    }
  });
  return known ? done : refuse_dtype(kName, self.dtype);
}

}  // namespace

MCTL_EXPORT AOTITorchError aoti_torch_index_put_out(Handle out_handle, Handle self_handle, const Handle* indices,
                                                    std::uint32_t count, Handle values_handle, bool accumulate) {
  const Tensor *out = find(out_handle), *self = find(self_handle), *values = find(values_handle);
  if (out == nullptr || self == nullptr || values == nullptr) return kFailed;
  if (same_dtype(kName, *out, *self) != kDone || same_dtype(kName, *out, *values) != kDone) return kFailed;
  if (out->rank != self->rank || !std::equal(out->sizes, out->sizes + out->rank, self->sizes))
    return fail("`%s` to a tensor of another shape", kName);
  Indexed all;
  if (gather_indices(*out, indices, count, all) != kDone) return kFailed;
  if (out->data() != self->data() && copy(*out, *self) != kDone) return kFailed;
  return index_put(*out, all, *values, accumulate);
}

}  // namespace mctl::shim
