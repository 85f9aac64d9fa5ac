#include "model/tensor_copy.h"

#include <boost/test/unit_test.hpp>
#include <cstring>
#include <numeric>
#include <vector>

namespace mctl {
namespace {

// Element by element, by the definition of strides.
template <class T>
std::vector<T> expected(const std::vector<T>& from, const std::vector<std::int64_t>& sizes,
                        const std::vector<std::int64_t>& strides) {
  std::vector<T> result;
  const auto count = std::accumulate(sizes.begin(), sizes.end(), std::int64_t{1}, std::multiplies());
  for (std::int64_t i = 0; i < count; ++i) {
    std::int64_t rest = i, at = 0;
    for (std::size_t axis = sizes.size(); axis-- > 0; rest /= sizes[axis]) at += rest % sizes[axis] * strides[axis];
    result.push_back(from[static_cast<std::size_t>(at)]);
  }
  return result;
}

template <class T>
void expect_copy(const std::vector<std::int64_t>& sizes, const std::vector<std::int64_t>& strides) {
  std::vector<T> from(4096);
  std::iota(from.begin(), from.end(), T{});
  const auto wanted = expected(from, sizes, strides);
  std::vector<T> to(wanted.size() + 1, T{77});
  copy_row_major(reinterpret_cast<std::byte*>(to.data()), reinterpret_cast<const std::byte*>(from.data()), sizes,
                 strides, sizeof(T));
  BOOST_TEST(to.back() == T{77});
  to.pop_back();
  BOOST_TEST(to == wanted, boost::test_tools::per_element());
}

BOOST_AUTO_TEST_SUITE(tensor_copy_)

BOOST_AUTO_TEST_CASE(any_strides) {
  const std::vector<std::pair<std::vector<std::int64_t>, std::vector<std::int64_t>>> layouts = {
      {{}, {}},
      {{5}, {1}},
      {{5}, {3}},
      {{5}, {0}},
      {{2, 3}, {3, 1}},
      {{3, 2}, {1, 3}},                // transposed
      {{4, 3}, {0, 1}},                // expanded
      {{4, 1, 3}, {3, 99, 1}},         // the stride of a single element says nothing
      {{2, 3, 4, 5}, {60, 1, 15, 3}},  // channels last
      {{2, 3, 4}, {24, 8, 2}},         // every other element
      {{3, 0, 2}, {1, 1, 1}},          // none at all
  };
  for (const auto& [sizes, strides] : layouts) {
    expect_copy<std::uint8_t>(sizes, strides);
    expect_copy<std::uint16_t>(sizes, strides);
    expect_copy<float>(sizes, strides);
    expect_copy<std::int64_t>(sizes, strides);
  }
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace mctl
