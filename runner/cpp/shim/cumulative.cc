// cumsum and cumprod: sums and products from the beginning of an axis on.
#include "operators.h"

namespace mctl::shim {
namespace {

// What torch adds up in.
template <class E>
using Total = std::conditional_t<is_narrow<E> || std::is_same_v<E, float>, double,
                                 std::conditional_t<std::is_same_v<E, double>, double, std::int64_t>>;

template <class Step>
AOTITorchError cumulate(const char* name, Handle self, std::int64_t dim, const std::int32_t* dtype, int start,
                        Handle* result, Step step) {
  const Tensor* tensor = find(self);
  std::int32_t axis = 0;
  if (tensor == nullptr || find_axis(*tensor, dim, &axis) != kDone) return kFailed;
  const bool is_float = tensor->dtype == 5 || tensor->dtype == 6 || tensor->dtype == 7 || tensor->dtype == 15;
  const std::int32_t to = dtype != nullptr ? *dtype : is_float ? tensor->dtype : 4;
  AOTITorchError done = kFailed;
  const bool known = with_type(to, [&]<class E>(E*) {
    if constexpr (std::is_same_v<E, bool>) {
      refuse_dtype(name, to);
    } else {
      Handle made = nullptr;
      if (make_rows(tensor->rank, tensor->sizes, to, &made) != kDone) return;
      const Tensor& out = *find(made);
      if (copy(out, *tensor) != kDone) {
        remove(made);
        return;
      }
      const Lines lines(out, axis);
      const std::int64_t apart = lines.step(out.strides);
      const int threads = threads_for(static_cast<double>(out.count) * 32);
      share_out(threads, lines.count(), [&](std::int64_t line, int) {
        E* const x = elements<E>(out) + lines.begin(line, out.strides);
        auto total = static_cast<Total<E>>(start);
        for (std::int64_t i = 0; i < lines.size(); ++i) {
          total = step(total, cast<Total<E>>(x[i * apart]));
          x[i * apart] = cast<E>(total);
        }
      });
      *result = made;
      done = kDone;
    }
  });
  return known ? done : refuse_dtype(name, to);
}

// Integers wrap round.
template <class T>
T sum(T one, T other) {
  if constexpr (std::is_integral_v<T>)
    return static_cast<T>(static_cast<std::uint64_t>(one) + static_cast<std::uint64_t>(other));
  else
    return one + other;
}

template <class T>
T times(T one, T other) {
  if constexpr (std::is_integral_v<T>)
    return static_cast<T>(static_cast<std::uint64_t>(one) * static_cast<std::uint64_t>(other));
  else
    return one * other;
}

}  // namespace

MCTL_EXPORT AOTITorchError aoti_torch_cpu_cumsum(Handle self, std::int64_t dim, std::int32_t* dtype, Handle* result) {
  return cumulate("cumsum", self, dim, dtype, 0, result, []<class T>(T one, T other) { return sum(one, other); });
}

MCTL_EXPORT AOTITorchError aoti_torch_cpu_cumprod(Handle self, std::int64_t dim, std::int32_t* dtype, Handle* result) {
  return cumulate("cumprod", self, dim, dtype, 1, result, []<class T>(T one, T other) { return times(one, other); });
}

}  // namespace mctl::shim
