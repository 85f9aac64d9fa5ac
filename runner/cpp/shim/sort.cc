// sort, topk and kthvalue along an axis. NaN counts as larger than every number, as torch has it.
#include <cmath>

#include "operators.h"

namespace mctl::shim {
namespace {

template <class E>
bool is_nan(E value) {
  if constexpr (is_narrow<E>)
    return std::isnan(static_cast<float>(value));
  else if constexpr (std::is_floating_point_v<E>)
    return std::isnan(value);
  else
    return false;
}

template <class E>
bool below(E one, E other) {
  if (is_nan(other)) return !is_nan(one);
  if constexpr (is_narrow<E>)
    return static_cast<float>(one) < static_cast<float>(other);
  else
    return one < other;
}

template <class E>
struct Item {
  E value;
  std::int64_t index;
};

// Equal ones keep their order.
template <class E>
struct Before {
  bool descending;

  bool operator()(const Item<E>& one, const Item<E>& other) const {
    const bool less = descending ? below(other.value, one.value) : below(one.value, other.value);
    const bool more = descending ? below(one.value, other.value) : below(other.value, one.value);
    return less || (!more && one.index < other.index);
  }
};

// A tensor, and the axis along which it is arranged.
struct Along {
  const Tensor* self;
  std::int32_t axis;
  std::int64_t size;
};

AOTITorchError find_along(Handle handle, std::int64_t dim, Along* result) {
  const Tensor* self = result->self = find(handle);
  if (self == nullptr || find_axis(*self, dim, &result->axis) != kDone) return kFailed;
  result->size = self->rank == 0 ? 1 : self->sizes[result->axis];
  return kDone;
}

// Where the results of a line go: `keep` of its items from `first` on, after `order` has put them there.
struct Plan {
  const char* name;
  std::int64_t first, keep;
  bool keep_axis, like_self;  // with the axis of what is kept; with the strides of `self`
};

AOTITorchError make_results(const Tensor& self, std::int32_t axis, const Plan& plan, Handle* values, Handle* indices) {
  std::int64_t sizes[kMaxRank], strides[kMaxRank];
  std::copy(self.sizes, self.sizes + self.rank, sizes);
  if (self.rank > 0) sizes[axis] = plan.keep;
  if (plan.like_self)
    dense(self, strides);
  else
    row_major(self.rank, sizes, strides);
  if (make_empty(self.rank, sizes, strides, self.dtype, values) != kDone) return kFailed;
  if (make_empty(self.rank, sizes, strides, 4, indices) == kDone) return kDone;
  remove(*values);
  return kFailed;
}

template <class Order>
AOTITorchError arrange(const Along& along, const Plan& plan, Handle* values, Handle* indices, Order order) {
  const Tensor& self = *along.self;
  const std::int32_t axis = along.axis;
  AOTITorchError done = kFailed;
  const bool known = with_type(self.dtype, [&]<class E>(E*) {
    Handle made = nullptr, made_indices = nullptr;
    const Lines lines(self, axis);
    const int threads = threads_for(static_cast<double>(self.count) * 64);
    const Scratch scratch(lines.size(), threads * std::int64_t{sizeof(Item<E>)});
    if (!scratch || make_results(self, axis, plan, &made, &made_indices) != kDone) return;
    Tensor &out = *find(made), &out_indices = *find(made_indices);
    const std::int64_t step = lines.step(self.strides), out_step = lines.step(out.strides);
    share_out(threads, lines.count(), [&](std::int64_t line, int thread) {
      auto* const items = scratch.at<Item<E>>(lines.size() * thread);
      const E* const from = elements<E>(self) + lines.begin(line, self.strides);
      for (std::int64_t i = 0; i < lines.size(); ++i) items[i] = {from[i * step], i};
      order(items, lines.size());
      const std::int64_t to = lines.begin(line, out.strides);
      for (std::int64_t i = 0; i < plan.keep; ++i) {
        elements<E>(out)[to + i * out_step] = items[plan.first + i].value;
        elements<std::int64_t>(out_indices)[to + i * out_step] = items[plan.first + i].index;
      }
    });
    if (!plan.keep_axis && self.rank > 0)
      for (Tensor* tensor : {&out, &out_indices}) {
        std::copy(tensor->sizes + axis + 1, tensor->sizes + tensor->rank, tensor->sizes + axis);
        std::copy(tensor->strides + axis + 1, tensor->strides + tensor->rank, tensor->strides + axis);
        --tensor->rank;
      }
    *values = made;
    *indices = made_indices;
    done = kDone;
  });
  return known ? done : refuse_dtype(plan.name, self.dtype);
}

}  // namespace

MCTL_EXPORT AOTITorchError aoti_torch_cpu_sort_stable(Handle handle, std::int32_t*, std::int64_t dim,
                                                      std::int32_t descending, Handle* values, Handle* indices) {
  Along along{};
  if (find_along(handle, dim, &along) != kDone) return kFailed;
  return arrange(along, {"sort", 0, along.size, true, true}, values, indices,
                 [descending]<class E>(Item<E>* items, std::int64_t count) {
                   std::sort(items, items + count, Before<E>{descending != 0});
                 });
}

MCTL_EXPORT AOTITorchError aoti_torch_cpu_sort(Handle handle, std::int64_t dim, std::int32_t descending, Handle* values,
                                               Handle* indices) {
  return aoti_torch_cpu_sort_stable(handle, nullptr, dim, descending, values, indices);
}

MCTL_EXPORT AOTITorchError aoti_torch_cpu_topk(Handle handle, std::int64_t k, std::int64_t dim, std::int32_t largest,
                                               std::int32_t sorted, Handle* values, Handle* indices) {
  Along along{};
  if (find_along(handle, dim, &along) != kDone) return kFailed;
  if (k < 0 || k > along.size)
    return fail("`topk` of %lld out of %lld", static_cast<long long>(k), static_cast<long long>(along.size));
  return arrange(along, {"topk", 0, along.self->rank == 0 ? 1 : k, true, false}, values, indices,
                 [=]<class E>(Item<E>* items, std::int64_t count) {
                   const Before<E> before{largest != 0};
                   if (k < count / 64) return std::partial_sort(items, items + k, items + count, before);
                   if (k < count) std::nth_element(items, items + k, items + count, before);
                   if (sorted != 0) std::sort(items, items + k, before);
                 });
}

MCTL_EXPORT AOTITorchError aoti_torch_cpu_kthvalue(Handle handle, std::int64_t k, std::int64_t dim, std::int32_t keep,
                                                   Handle* values, Handle* indices) {
  Along along{};
  if (find_along(handle, dim, &along) != kDone) return kFailed;
  if (k < 1 || k > along.size)
    return fail("`kthvalue` %lld of %lld", static_cast<long long>(k), static_cast<long long>(along.size));
  return arrange(along, {"kthvalue", k - 1, 1, keep != 0, false}, values, indices,
                 [k]<class E>(Item<E>* items, std::int64_t count) {
                   std::nth_element(items, items + k - 1, items + count, Before<E>{false});
                 });
}

}  // namespace mctl::shim
