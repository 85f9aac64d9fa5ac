#include "format/elements.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "format/narrow.h"

namespace mctl {
namespace {

double real_of(const JsonNumber& number) {
  if (number.kind == JsonNumber::negative) return static_cast<double>(number.below);
  if (number.kind == JsonNumber::natural) return static_cast<double>(number.above);
  return number.value;
}

template <class T>
void put(T value, std::byte* to) {
  std::memcpy(to, &value, sizeof value);
}

// 3.0 and 3e0 are the integer 3; 3.5 is none. Beyond 2^53 a double no longer says which integer was meant.
template <class T>
bool store_integer(const JsonNumber& number, std::byte* to) {
  if (number.kind == JsonNumber::negative && std::in_range<T>(number.below)) return put<T>(number.below, to), true;
  if (number.kind == JsonNumber::natural && std::in_range<T>(number.above)) return put<T>(number.above, to), true;
  if (number.kind != JsonNumber::real || std::abs(number.value) > 0x1p53) return false;
  const auto whole = static_cast<std::int64_t>(number.value);
  if (static_cast<double>(whole) != number.value || !std::in_range<T>(whole)) return false;
  return put<T>(whole, to), true;
}

template <class T>
bool store_float(const JsonNumber& number, std::byte* to) {
  if (number.kind == JsonNumber::boolean) return false;
  const auto value = static_cast<T>(real_of(number));
  if (!std::isfinite(value)) return false;
  return put(value, to), true;
}

bool store_narrow(const JsonNumber& number, int exponent_bits, int mantissa_bits, std::byte* to) {
  if (number.kind == JsonNumber::boolean) return false;
  const std::uint16_t bits = narrow(real_of(number), exponent_bits, mantissa_bits);
  const std::uint16_t infinity = ((1 << exponent_bits) - 1) << mantissa_bits;
  if ((bits & 0x7fff) >= infinity) return false;
  return put(bits, to), true;
}

bool store_boolean(const JsonNumber& number, std::byte* to) {
  const bool known = number.kind == JsonNumber::boolean || (number.kind == JsonNumber::natural && number.above <= 1);
  if (!known) return false;
  return put<std::uint8_t>(number.kind == JsonNumber::boolean ? number.truth : number.above != 0, to), true;
}

// Characters that to_chars needs at most for the shortest form, and a comma.
template <class T>
constexpr std::size_t kLongest = std::is_same_v<T, float>    ? sizeof "-1.17549435e-38,"
                                 : std::is_same_v<T, double> ? sizeof "-2.2250738585072014e-308,"
                                                             : std::numeric_limits<T>::digits10 + 3;

template <class T, class Widen>
std::optional<std::size_t> append_numbers(std::string& out, std::span<const std::byte> data, Widen widen) {
  constexpr std::size_t longest = kLongest<decltype(widen(T{}))>;
  const std::size_t count = data.size() / sizeof(T), begin = out.size();
  out.resize(begin + count * longest);
  char* at = out.data() + begin;
  for (std::size_t i = 0; i < count; ++i) {
    T raw;
    std::memcpy(&raw, data.data() + i * sizeof(T), sizeof raw);
    const auto value = widen(raw);
    if constexpr (std::is_floating_point_v<decltype(value)>) {
      if (!std::isfinite(value)) return i;
    }
    at = std::to_chars(at, at + longest, value).ptr;
    if constexpr (std::is_floating_point_v<decltype(value)>) {
      if (value == 0 && std::signbit(value)) at = std::copy_n(".0", 2, at);  // many readers take "-0" for the integer
    }
    *at++ = ',';
  }
  out.resize(at - out.data() - (count ? 1 : 0));
  return std::nullopt;
}

template <class T>
float widened(T value) {
  return static_cast<float>(value);
}

void append_booleans(std::string& out, std::span<const std::byte> data) {
  for (std::size_t i = 0; i < data.size(); ++i) {
    if (i) out += ',';
    out += data[i] != std::byte{0} ? "true" : "false";
  }
}

// Calls f with a value of the type that holds a dtype which has one.
template <class F>
auto with_type(Dtype dtype, F f) {
  switch (dtype) {
    case Dtype::u8:
      return f(std::uint8_t{});
    case Dtype::u16:
      return f(std::uint16_t{});
    case Dtype::u32:
      return f(std::uint32_t{});
    case Dtype::u64:
      return f(std::uint64_t{});
    case Dtype::i8:
      return f(std::int8_t{});
    case Dtype::i16:
      return f(std::int16_t{});
    case Dtype::i32:
      return f(std::int32_t{});
    case Dtype::i64:
      return f(std::int64_t{});
    case Dtype::f32:
      return f(float{});
    default:
      return f(double{});
  }
}

}  // namespace

bool store(Dtype dtype, const JsonNumber& number, std::byte* to) {
  if (dtype == Dtype::boolean) return store_boolean(number, to);
  if (dtype == Dtype::f16) return store_narrow(number, 5, 10, to);
  if (dtype == Dtype::bf16) return store_narrow(number, 8, 7, to);
  return with_type(dtype, [&]<class T>(T) {
    if constexpr (std::is_floating_point_v<T>) {
      return store_float<T>(number, to);
    } else {
      return store_integer<T>(number, to);
    }
  });
}

bool store(Dtype dtype, double value, std::byte* to) {
  if (dtype == Dtype::boolean) return store(dtype, JsonNumber{JsonNumber::boolean, {.truth = value != 0}}, to);
  return store(dtype, JsonNumber{JsonNumber::real, {.value = value}}, to);
}

std::optional<std::size_t> append_elements(std::string& out, Dtype dtype, std::span<const std::byte> data) {
  if (dtype == Dtype::boolean) return append_booleans(out, data), std::nullopt;
  if (dtype == Dtype::f16) return append_numbers<Float16>(out, data, widened<Float16>);
  if (dtype == Dtype::bf16) return append_numbers<Bfloat16>(out, data, widened<Bfloat16>);
  return with_type(dtype, [&]<class T>(T) { return append_numbers<T>(out, data, [](T value) { return value; }); });
}

std::uint16_t narrow(double value, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0, infinity = ((1 << exponent_bits) - 1) << mantissa_bits;
  const double magnitude = std::abs(value);
  if (std::isnan(value)) return sign | infinity | 1;
  if (magnitude == 0) return sign;
  // In units of the last place it is a whole number plus what is rounded away; subnormals share the smallest unit.
  const int exponent = std::max(std::isinf(value) ? bias + 1 : std::ilogb(magnitude), 1 - bias);
  if (exponent > bias) return sign | infinity;
  const auto units = static_cast<std::uint32_t>(std::nearbyint(std::ldexp(magnitude, mantissa_bits - exponent)));
  // A carry out of the mantissa moves into the exponent, and from the largest one into infinity, as it should.
  const std::uint32_t bits = units + (static_cast<std::uint32_t>(exponent + bias - 1) << mantissa_bits);
  return sign | static_cast<std::uint16_t>(bits);
}

}  // namespace mctl
