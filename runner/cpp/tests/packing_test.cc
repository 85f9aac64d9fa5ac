// Rows of several requests in one batch: where they lie, what pads them, and that nobody's rows reach another.
#include "engine/packing.h"

#include <boost/test/unit_test.hpp>
#include <cstring>
#include <numeric>

#include "pool/model_areas.h"
#include "support.h"

namespace mctl {
namespace {

using Values = std::vector<std::int32_t>;

// x[batch,seq] (pad -1) and a shared s[2]; y[2*batch,seq] and whole[1].
Manifest manifest_of() {
  Manifest manifest;
  Contract& contract = manifest.contract;
  contract.dims = {{"batch", 1, 8, 1}, {"seq", 1, 4, 1}};
  const auto axis = [&](std::string_view text) { return *Expression::parse(text, contract.dims); };
  contract.inputs = {{"x", Dtype::i32, {axis("batch"), axis("seq")}, std::nullopt, -1.0},
                     {"s", Dtype::i32, {Expression::fixed(2)}, std::nullopt, std::nullopt}};
  contract.outputs = {{"y", Dtype::i32, {axis("2*batch"), axis("seq")}, std::nullopt, std::nullopt},
                      {"whole", Dtype::i32, {Expression::fixed(1)}, std::nullopt, std::nullopt}};
  contract.batch_dim = 0;
  manifest.buckets = {{"batch", {1, 2, 4, 8}}, {"seq", {2, 4}}};
  return manifest;
}

std::span<const std::byte> raw(const Values& values) { return std::as_bytes(std::span(values)); }

Values numbers(std::span<const std::byte> data, std::size_t count) {
  Values values(count);
  std::memcpy(values.data(), data.data(), count * sizeof(std::int32_t));
  return values;
}

struct Two {
  const Manifest manifest = manifest_of();
  Packing packing{manifest};
  Arena arena = *Arena::create(*model_areas(manifest.contract));
  const Values x = {1, 2, 3, 4, 5, 6}, other = {7, 8}, shared = {9, 9};
  const std::vector<std::span<const std::byte>> first = {raw(x), raw(shared)}, second = {raw(other), raw(shared)};
  const DimSizes first_dims = {2, 3}, second_dims = {1, 2};
  const Piece a{first, &first_dims, 0, 2, 0}, b{second, &second_dims, 0, 1, 2};
};

BOOST_FIXTURE_TEST_CASE(packing_fills_rows_and_pads, Two) {
  const DimSizes sizes = packing.sizes(first_dims, 4);
  BOOST_TEST(sizes == (DimSizes{4, 4}), boost::test_tools::per_element());
  BOOST_TEST(packing.bucket_of(sizes) == "batch=4,seq=4");
  std::memset(arena.input(0, 0).data(), 99, 64);
  packing.fill(arena, 0, sizes, a);
  packing.fill(arena, 0, sizes, b);
  packing.fill_pad_rows(arena, 0, sizes, 3);
  BOOST_TEST(numbers(arena.input(0, 0), 16) == (Values{1, 2, 3, -1, 4, 5, 6, -1, 7, 8, -1, -1, -1, -1, -1, -1}),
             boost::test_tools::per_element());
  BOOST_TEST(numbers(arena.input(0, 1), 2) == shared, boost::test_tools::per_element());
}

BOOST_FIXTURE_TEST_CASE(packing_cuts_answers, Two) {
  Values y(32);
  std::iota(y.begin(), y.end(), 0);
  std::memcpy(arena.output(0, 0).data(), y.data(), y.size() * 4);
  const DimSizes sizes = {4, 4};
  std::vector<std::byte> storage;
  const auto mine = packing.cut(arena, 0, sizes, a, 0, storage);
  BOOST_REQUIRE(mine);
  BOOST_TEST(mine->shape == (DimSizes{4, 3}), boost::test_tools::per_element());
  BOOST_TEST(numbers(mine->data, 12) == (Values{0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14}),
             boost::test_tools::per_element());
  const DimSizes full = {1, 4};
  const auto whole_rows = packing.cut(arena, 0, sizes, {second, &full, 0, 1, 2}, 0, storage);
  BOOST_TEST(numbers(whole_rows->data, 8) == (Values{16, 17, 18, 19, 20, 21, 22, 23}),
             boost::test_tools::per_element());
  BOOST_TEST(packing.cut(arena, 0, sizes, b, 1, storage)->data.size() == 4u);
  BOOST_TEST(packing.offset_in_output(0, first_dims, 1) == 2u * 3 * 4);
}

BOOST_FIXTURE_TEST_CASE(packing_part_of_a_request, Two) {
  packing.fill(arena, 1, {1, 4}, {first, &first_dims, 1, 1, 0});
  BOOST_TEST(numbers(arena.input(1, 0), 4) == (Values{4, 5, 6, -1}), boost::test_tools::per_element());
}

BOOST_FIXTURE_TEST_CASE(packing_who_shares_a_batch, Two) {
  const Values unlike = {9, 8};
  const std::vector<std::span<const std::byte>> third = {raw(other), raw(unlike)};
  BOOST_TEST(packing.key_of(packing.kind_of({2, 3}), first) == packing.key_of(packing.kind_of({1, 4}), second));
  BOOST_TEST(packing.key_of(packing.kind_of({2, 3}), first) != packing.key_of(packing.kind_of({2, 2}), first));
  BOOST_TEST(packing.key_of(packing.kind_of({1, 4}), second) != packing.key_of(packing.kind_of({1, 4}), third));
}

BOOST_AUTO_TEST_CASE(packing_without_batches) {
  Manifest manifest = manifest_of();
  manifest.contract.state = {{"n", Dtype::i64, {}}};
  Packing stateful(manifest);
  BOOST_TEST(!stateful.batch_dim());
  BOOST_TEST(stateful.rows_of({5, 3}) == 1);
  BOOST_TEST(stateful.sizes({5, 3}, 1) == (DimSizes{5, 3}), boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(packing_smallest_batches) {
  Manifest manifest = manifest_of();
  manifest.contract.dims[0] = {"batch", 4, 8, 4};
  const Packing packing(manifest);
  BOOST_TEST(packing.sizes({4, 1}, 1)[0] == 4);
  BOOST_TEST(packing.sizes({4, 1}, 5)[0] == 8);
}

BOOST_AUTO_TEST_CASE(packing_fillers_are_allowed_values) {
  Manifest manifest = manifest_of();
  manifest.contract.inputs[0].pad.reset();
  manifest.contract.inputs[0].range = {Expression::fixed(5), Expression::fixed(9)};
  const Packing packing(manifest);
  Arena arena = *Arena::create(*model_areas(manifest.contract));
  packing.fill_pad_rows(arena, 0, {2, 2}, 1);
  BOOST_TEST(numbers(arena.input(0, 0), 4) == (Values{0, 0, 5, 5}), boost::test_tools::per_element());
}

}  // namespace
}  // namespace mctl
