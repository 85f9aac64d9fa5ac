// searchsorted and bucketize: where values would have to be put into sorted ones.
#include <string_view>

#include "operators.h"

namespace mctl::shim {
namespace {

constexpr auto kName = "searchsorted";

// The number of elements before `value`, or with `right` before and equal. NaN counts as larger than every number.
template <class E>
std::int64_t position(const E* sorted, std::int64_t step, std::int64_t count, E value, bool right) {
  std::int64_t begin = 0;
  while (begin < count) {
    const std::int64_t middle = begin + (count - begin) / 2;
    if constexpr (is_narrow<E>) {
      const auto at = static_cast<float>(sorted[middle * step]), wanted = static_cast<float>(value);
      if (right ? at > wanted : at >= wanted)
        count = middle;
      else
        begin = middle + 1;
    } else {
      const E at = sorted[middle * step];
      if (right ? at > value : at >= value)
        count = middle;
      else
        begin = middle + 1;
    }
  }
  return begin;
}

AOTITorchError search(Handle sorted_handle, Handle values_handle, bool narrow, bool right, Handle* result) {
  const Tensor *sorted = find(sorted_handle), *values = find(values_handle);
  if (sorted == nullptr || values == nullptr || same_dtype(kName, *sorted, *values) != kDone) return kFailed;
  if (sorted->rank < 1) return fail("`%s` in a tensor without axes", kName);
  const std::int32_t last = values->rank - 1;
  const bool one = sorted->rank == 1;  // for all values
  bool fits = one || sorted->rank == values->rank;
  for (std::int32_t axis = 0; !one && fits && axis < last; ++axis) fits = sorted->sizes[axis] == values->sizes[axis];
  if (!fits) return fail("`%s` in a tensor whose shape does not fit that of the values", kName);
  AOTITorchError done = kFailed;
  const bool known = with_type(values->dtype, [&]<class E>(E*) {
    Handle made = nullptr;
    if (make_rows(values->rank, values->sizes, narrow ? 3 : 4, &made) != kDone) return;
    const Tensor& out = *find(made);
    const Lines lines(*values, std::max(last, 0));
    const std::int64_t count = sorted->sizes[sorted->rank - 1], step = sorted->strides[sorted->rank - 1];
    const int threads = threads_for(static_cast<double>(values->count) * 32);
    share_out(threads, lines.count(), [&](std::int64_t line, int) {
      const E* const in = elements<E>(*sorted) + (one ? 0 : lines.begin(line, sorted->strides));
      const E* const from = elements<E>(*values) + lines.begin(line, values->strides);
      const std::int64_t to = lines.begin(line, out.strides);
      for (std::int64_t i = 0; i < lines.size(); ++i) {
        const std::int64_t found = position(in, step, count, from[i * lines.step(values->strides)], right);
        if (narrow)
          elements<std::int32_t>(out)[to + i] = static_cast<std::int32_t>(found);
        else
          elements<std::int64_t>(out)[to + i] = found;
      }
    });
    *result = made;
    done = kDone;
  });
  return known ? done : refuse_dtype(kName, values->dtype);
}

}  // namespace

MCTL_EXPORT AOTITorchError aoti_torch_cpu_searchsorted_Tensor(Handle sorted, Handle values, std::int32_t narrow,
                                                              std::int32_t right, const char** side, Handle* sorter,
                                                              Handle* result) {
  if (sorter != nullptr) return fail("mctl's shim has no `%s` with a sorter", kName);
  return search(sorted, values, narrow != 0, side != nullptr ? std::string_view(*side) == "right" : right != 0, result);
}

MCTL_EXPORT AOTITorchError aoti_torch_cpu_bucketize_Tensor(Handle values, Handle boundaries, std::int32_t narrow,
                                                           std::int32_t right, Handle* result) {
  return search(boundaries, values, narrow != 0, right != 0, result);
}

}  // namespace mctl::shim
