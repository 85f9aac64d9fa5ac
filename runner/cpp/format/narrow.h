// float16 (IEEE 754 binary16) and bfloat16 (the upper half of binary32): what their bits stand for, and rounding to
// them.
//
// Two more ways to round stand where they have to be others: elements.cc rounds doubles, as JSON has them, once and not
// twice; `rounded` of aoti/kernels/vector.h is compiled without the runner's sources.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace mctl {

struct Bfloat16 {
  std::uint16_t bits;

  Bfloat16() = default;
  explicit Bfloat16(float value) {
    const auto whole = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t half = 0x7fff + ((whole >> 16) & 1);  // to nearest, ties to even
    bits = static_cast<std::uint16_t>(std::isnan(value) ? 0x7fc0 : (whole + half) >> 16);
  }
  explicit operator float() const { return std::bit_cast<float>(std::uint32_t{bits} << 16); }
};

struct Float16 {
  std::uint16_t bits;

  Float16() = default;
  explicit Float16(float value) {
    const auto whole = std::bit_cast<std::uint32_t>(value);
    const auto sign = static_cast<std::uint16_t>(whole >> 16 & 0x8000);
    const float size = std::fabs(value);
    if (std::isnan(value)) {
      bits = sign | 0x7e00;
    } else if (size >= 65520.0f) {  // rounds to what float16 has no number for
      bits = sign | 0x7c00;
    } else if (size < 0x1p-14f) {  // adding 0.5 moves the last bit of a subnormal to that of the float
      bits = sign | static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(size + 0.5f) - 0x3f000000);
    } else {
      const auto magnitude = whole & 0x7fffffff;
      bits = sign | static_cast<std::uint16_t>((magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13);
    }
  }
  explicit operator float() const {
    const std::uint32_t sign = std::uint32_t{bits & 0x8000u} << 16, rest = bits & 0x7fff;
    float size;
    if (rest >= 0x7c00) {
      size = std::bit_cast<float>(0x7f800000 | (rest & 0x3ff) << 13);
    } else if (rest < 0x400) {
      size = static_cast<float>(rest) * 0x1p-24f;
    } else {
      size = std::bit_cast<float>((rest << 13) + 0x38000000);
    }
    return std::bit_cast<float>(std::bit_cast<std::uint32_t>(size) | sign);
  }
};

}  // namespace mctl
