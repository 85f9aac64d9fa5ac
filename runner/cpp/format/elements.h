// Elements of tensors as JSON numbers, both ways.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "format/contract.h"

namespace mctl {

// A number or boolean of a JSON text. An integer that fits no 64 bits is real.
struct JsonNumber {
  enum Kind : std::uint8_t { boolean, negative, natural, real } kind;
  union {
    bool truth;
    std::int64_t below;  // negative
    std::uint64_t above;
    double value;
  };
};

// Writes one element to `to`; false if the dtype does not hold this number. Floats are rounded to nearest, ties to
// even.
bool store(Dtype dtype, const JsonNumber& number, std::byte* to);
bool store(Dtype dtype, double value, std::byte* to);  // of a boolean: is it other than 0?

// Appends elements as `1,2,3`; the first that JSON cannot say (NaN, Infinity) ends it and is returned by its index.
std::optional<std::size_t> append_elements(std::string& out, Dtype dtype, std::span<const std::byte> data);

// The bits of a float with so many exponent and mantissa bits (binary16: 5 and 10; bfloat16: 8 and 7).
std::uint16_t narrow(double value, int exponent_bits, int mantissa_bits);

}  // namespace mctl
