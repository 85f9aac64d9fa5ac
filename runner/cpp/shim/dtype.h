// torch's numbers of dtypes (c10/core/ScalarType.h), and what C++ type holds an element.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "format/narrow.h"

namespace mctl::shim {

// name, number, bytes of an element
// clang-format off
#define MCTL_DTYPES(_) \
  _(uint8, 0, 1) _(int8, 1, 1) _(int16, 2, 2) _(int32, 3, 4) _(int64, 4, 8) \
  _(float16, 5, 2) _(float32, 6, 4) _(float64, 7, 8) _(complex32, 8, 4) _(complex64, 9, 8) \
  _(complex128, 10, 16) _(bool, 11, 1) _(bfloat16, 15, 2) _(float8_e5m2, 23, 1) _(float8_e4m3fn, 24, 1) \
  _(float8_e5m2fnuz, 25, 1) _(float8_e4m3fnuz, 26, 1) _(uint16, 27, 2) _(uint32, 28, 4) _(uint64, 29, 8) \
  _(float8_e8m0fnu, 44, 1) _(float4_e2m1fn_x2, 45, 1)
// clang-format on

// Bytes of an element; 0 for a dtype that is not known here.
constexpr std::size_t item_size(std::int32_t dtype) {
  switch (dtype) {
#define MCTL_CASE(name, number, bytes) \
  case number:                         \
    return bytes;
    MCTL_DTYPES(MCTL_CASE)
#undef MCTL_CASE
    default:
      return 0;
  }
}

using mctl::Bfloat16, mctl::Float16;

// Calls `f` with a null pointer to the type of the dtype's elements. False: there is no arithmetic for it here.
template <class F>
bool with_type(std::int32_t dtype, F&& f) {
  switch (dtype) {
    case 0:
      return f(static_cast<std::uint8_t*>(nullptr)), true;
    case 1:
      return f(static_cast<std::int8_t*>(nullptr)), true;
    case 2:
      return f(static_cast<std::int16_t*>(nullptr)), true;
    case 3:
      return f(static_cast<std::int32_t*>(nullptr)), true;
    case 4:
      return f(static_cast<std::int64_t*>(nullptr)), true;
    case 5:
      return f(static_cast<Float16*>(nullptr)), true;
    case 6:
      return f(static_cast<float*>(nullptr)), true;
    case 7:
      return f(static_cast<double*>(nullptr)), true;
    case 11:
      return f(static_cast<bool*>(nullptr)), true;
    case 15:
      return f(static_cast<Bfloat16*>(nullptr)), true;
    case 27:
      return f(static_cast<std::uint16_t*>(nullptr)), true;
    case 28:
      return f(static_cast<std::uint32_t*>(nullptr)), true;
    case 29:
      return f(static_cast<std::uint64_t*>(nullptr)), true;
    default:
      return false;
  }
}

template <class T>
constexpr bool is_narrow = std::is_same_v<T, Float16> || std::is_same_v<T, Bfloat16>;

// An element as another type, as torch casts.
template <class To, class From>
To cast(From value) {
  if constexpr (is_narrow<From>) {
    return cast<To>(static_cast<float>(value));
  } else if constexpr (is_narrow<To>) {
    return To(static_cast<float>(value));
  } else if constexpr (std::is_same_v<To, bool>) {
    return value != From(0);
  } else if constexpr (std::is_floating_point_v<From> && std::is_integral_v<To>) {
    return static_cast<To>(static_cast<std::int64_t>(value));  // the narrower ones wrap round
  } else {
    return static_cast<To>(value);
  }
}

}  // namespace mctl::shim
