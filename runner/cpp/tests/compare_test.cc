// Bit patterns: IEEE 754, tables of binary16; bfloat16 is the upper half of binary32.
#include "model/compare.h"

#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstdint>
#include <vector>

#include "support.h"

namespace mctl {
namespace {

template <class T>
std::string told(Dtype dtype, std::vector<T> got, std::vector<T> wanted, Tolerance tolerance = {1e-4, 1e-5}) {
  return difference(dtype, std::as_bytes(std::span(got)), std::as_bytes(std::span(wanted)), tolerance);
}

using Floats = std::vector<float>;
using Halves = std::vector<std::uint16_t>;

BOOST_AUTO_TEST_SUITE(compare_)

BOOST_AUTO_TEST_CASE(floats_within_a_tolerance) {
  BOOST_TEST(told(Dtype::f32, Floats{1, 100}, Floats{1.00005f, 100.005f}).empty());
  BOOST_TEST(told(Dtype::f32, Floats{1, 2, 3}, Floats{1, 2.5f, 3}) == "element 1 is 2.000000, eager gave 2.500000");
  BOOST_TEST(told(Dtype::f32, Floats{0, 5}, Floats{1, 9}, {0, 2}) == "element 1 is 5.000000, eager gave 9.000000");
  // A rounding of the large elements is allowed in the small ones beside them.
  BOOST_TEST(told(Dtype::f32, Floats{1e4f, 0.02f}, Floats{1e4f, 0.0f}).empty());
  BOOST_TEST(!told(Dtype::f32, Floats{1, 0.02f}, Floats{1, 0.0f}).empty());
  BOOST_TEST(!told(Dtype::f64, std::vector<double>{1}, std::vector<double>{1.0001}, {1e-9, 1e-9}).empty());
  BOOST_TEST(told(Dtype::f32, Floats{}, Floats{}).empty());
  BOOST_TEST(told(Dtype::f32, Floats{1}, Floats{1, 2}) == "it has another size than eager's");
}

BOOST_AUTO_TEST_CASE(floors_are_those_of_python) {
  const auto table = vectors("contract/tolerances.json");
  std::size_t floats = 0;
  for (const auto& [name, closeness] : table.as_object()) {
    BOOST_TEST(floor_of(dtype_from_name(name).value()) == closeness.at("floor").as_double(), name);
    ++floats;
  }
  BOOST_TEST(floats == 4u);
  BOOST_TEST(floor_of(Dtype::i32) == 0);
}

BOOST_AUTO_TEST_CASE(special_values_are_where_they_are) {
  const float inf = INFINITY;
  BOOST_TEST(told(Dtype::f32, Floats{NAN, inf, -inf, 0.0f}, Floats{NAN, inf, -inf, -0.0f}).empty());
  for (const auto& [got, wanted] : {std::pair{NAN, 1.0f}, {1.0f, NAN}, {inf, -inf}, {inf, 1.0f}, {1.0f, inf}})
    BOOST_TEST(!told(Dtype::f32, Floats{got}, Floats{wanted}, {1, 1e30}).empty());
}

BOOST_AUTO_TEST_CASE(half_precision) {
  // binary16: 1, 1 + 1/1024, the smallest subnormal, infinity, NaN, 65504
  BOOST_TEST(told(Dtype::f16, Halves{0x3c01}, Halves{0x3c00}, {1e-3, 0}).empty());
  BOOST_TEST(told(Dtype::f16, Halves{0x3c10}, Halves{0x3c00}, {1e-3, 0}) ==
             "element 0 is 1.015625, eager gave 1.000000");
  BOOST_TEST(told(Dtype::f16, Halves{0x0001}, Halves{0x8001}, {0, 1.2e-7}).empty());
  BOOST_TEST(!told(Dtype::f16, Halves{0x0001}, Halves{0x8001}, {0, 1.1e-7}).empty());
  BOOST_TEST(told(Dtype::f16, Halves{0x7c00, 0x7e00}, Halves{0x7c00, 0x7d00}).empty());
  BOOST_TEST(told(Dtype::f16, Halves{0x7bff}, Halves{0x0000}, {0, 0}) ==
             "element 0 is 65504.000000, eager gave 0.000000");
  // bfloat16: 1, 1 + 1/128, -2
  BOOST_TEST(told(Dtype::bf16, Halves{0x3f81}, Halves{0x3f80}, {1e-2, 0}).empty());
  BOOST_TEST(told(Dtype::bf16, Halves{0xc000}, Halves{0x3f80}, {1e-2, 0}) ==
             "element 0 is -2.000000, eager gave 1.000000");
}

BOOST_AUTO_TEST_CASE(integers) {
  const std::int64_t large = std::int64_t{1} << 60;
  BOOST_TEST(told<std::int64_t>(Dtype::i64, {large}, {large}).empty());
  BOOST_TEST(told<std::int64_t>(Dtype::i64, {large + 1}, {large}, {0, 0.5}) ==
             "element 0 is 1152921504606846977, eager gave 1152921504606846976");
  BOOST_TEST(told<std::int64_t>(Dtype::i64, {large + 1}, {large}, {0, 1}).empty());
  BOOST_TEST(told<std::int64_t>(Dtype::i64, {INT64_MIN}, {INT64_MAX}, {0, 1e19}) ==
             "element 0 is -9223372036854775808, eager gave 9223372036854775807");
  BOOST_TEST(told<std::uint8_t>(Dtype::boolean, {0}, {1}) == "element 0 is 0, eager gave 1");
  BOOST_TEST(told<std::int8_t>(Dtype::i8, {-1}, {-1}).empty());
  BOOST_TEST(told<std::uint16_t>(Dtype::u16, {65535}, {65534}, {0, 0}) == "element 0 is 65535, eager gave 65534");
  BOOST_TEST(told<std::uint32_t>(Dtype::u32, {1}, {1}).empty());
  BOOST_TEST(told<std::int16_t>(Dtype::i16, {1}, {1}).empty());
  BOOST_TEST(told<std::int32_t>(Dtype::i32, {1}, {2}) == "element 0 is 1, eager gave 2");
  BOOST_TEST(told<std::uint64_t>(Dtype::u64, {~std::uint64_t{0}}, {0}) ==
             "element 0 is 18446744073709551615, eager gave 0");
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace mctl
