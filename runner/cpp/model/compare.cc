#include "model/compare.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "format/narrow.h"

namespace mctl {
namespace {

template <class T>
double real(T value) {
  if constexpr (std::is_class_v<T>)
    return static_cast<float>(value);
  else
    return static_cast<double>(value);
}

template <class T>
T element(std::span<const std::byte> data, std::size_t index) {
  T value;
  std::memcpy(&value, data.data() + index * sizeof value, sizeof value);
  return value;
}

std::string told(std::size_t index, const std::string& got, const std::string& wanted) {
  return "element " + std::to_string(index) + " is " + got + ", eager gave " + wanted;
}

template <class T>
std::string integer_difference(std::span<const std::byte> got, std::span<const std::byte> wanted, Tolerance tolerance) {
  for (std::size_t i = 0; i < wanted.size() / sizeof(T); ++i) {
    const T a = element<T>(got, i), b = element<T>(wanted, i);
    // Their distance is exact in 64 bits without a sign, as their doubles are not.
    const std::uint64_t apart = a > b ? std::uint64_t(a) - std::uint64_t(b) : std::uint64_t(b) - std::uint64_t(a);
    if (static_cast<double>(apart) > tolerance.atol + tolerance.rtol * std::abs(static_cast<double>(b)))
      return told(i, std::to_string(a), std::to_string(b));
  }
  return {};
}

template <class T>
double mean_size(std::span<const std::byte> data) {
  double sum = 0, count = 0;
  for (std::size_t i = 0; i < data.size() / sizeof(T); ++i) {
    const double value = real(element<T>(data, i));
    if (std::isfinite(value)) sum += std::abs(value), ++count;
  }
  return count > 0 ? sum / count : 0;
}

// By how many times two numbers are further apart than allowed; 1 or less: they are not.
double excess(double got, double wanted, double allowed) {
  if (got == wanted || (std::isnan(got) && std::isnan(wanted))) return 0;
  const double times = std::abs(got - wanted) / allowed;
  return std::isfinite(got) && std::isfinite(wanted) && std::isfinite(times) ? times : HUGE_VAL;
}

template <class T>
std::string float_difference(std::span<const std::byte> got, std::span<const std::byte> wanted, Tolerance tolerance,
                             double floor) {
  const double mean = mean_size<T>(wanted);
  double worst = 1;
  std::string text;
  for (std::size_t i = 0; i < wanted.size() / sizeof(T); ++i) {
    const double a = real(element<T>(got, i)), b = real(element<T>(wanted, i));
    const double direct = tolerance.atol + tolerance.rtol * std::abs(b);
    const double times = excess(a, b, std::max(direct, floor * (std::abs(b) + mean)));
    if (times <= worst) continue;
    worst = times;
    text = told(i, std::to_string(a), std::to_string(b));
  }
  return text;
}

}  // namespace

double floor_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::f16:
      return 1e-3;
    case Dtype::bf16:
      return 8e-3;
    case Dtype::f32:
      return 1e-5;
    case Dtype::f64:
      return 1e-9;
    default:
      return 0;
  }
}

std::string difference(Dtype dtype, std::span<const std::byte> got, std::span<const std::byte> wanted,
                       Tolerance tolerance) {
  if (got.size() != wanted.size()) return "it has another size than eager's";
  switch (dtype) {
    case Dtype::boolean:
    case Dtype::u8:
      return integer_difference<std::uint8_t>(got, wanted, tolerance);
    case Dtype::u16:
      return integer_difference<std::uint16_t>(got, wanted, tolerance);
    case Dtype::u32:
      return integer_difference<std::uint32_t>(got, wanted, tolerance);
    case Dtype::u64:
      return integer_difference<std::uint64_t>(got, wanted, tolerance);
    case Dtype::i8:
      return integer_difference<std::int8_t>(got, wanted, tolerance);
    case Dtype::i16:
      return integer_difference<std::int16_t>(got, wanted, tolerance);
    case Dtype::i32:
      return integer_difference<std::int32_t>(got, wanted, tolerance);
    case Dtype::i64:
      return integer_difference<std::int64_t>(got, wanted, tolerance);
    case Dtype::f16:
      return float_difference<Float16>(got, wanted, tolerance, floor_of(dtype));
    case Dtype::bf16:
      return float_difference<Bfloat16>(got, wanted, tolerance, floor_of(dtype));
    case Dtype::f32:
      return float_difference<float>(got, wanted, tolerance, floor_of(dtype));
    case Dtype::f64:
      return float_difference<double>(got, wanted, tolerance, floor_of(dtype));
  }
  return "it has a dtype that is not known";
}

}  // namespace mctl
