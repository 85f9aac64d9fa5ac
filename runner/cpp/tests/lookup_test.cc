// Which variant runs, by the vectors that Python runs too.
#include "format/lookup.h"

#include <boost/test/unit_test.hpp>

#include "support.h"

namespace mctl {
namespace {

namespace json = boost::json;

Manifest read(const json::value& manifest) {
  auto parsed = parse_manifest(json::serialize(manifest));
  BOOST_REQUIRE_MESSAGE(parsed, why(parsed));
  return *std::move(parsed);
}

DimSizes sizes_of(const Manifest& manifest, const json::value& dims) {
  DimSizes sizes;
  for (const Dim& dim : manifest.contract.dims) sizes.push_back(dims.at(dim.name).as_int64());
  return sizes;
}

BOOST_AUTO_TEST_SUITE(lookup_)

BOOST_AUTO_TEST_CASE(lookup_vectors) {
  const json::value vectors = mctl::vectors("contract/lookup.json");
  const Manifest manifest = read(vectors.at("manifest"));
  for (const auto& item : vectors.at("cases").as_array()) {
    const Lookup lookup(manifest, item.at("threads").as_int64());
    const auto variant = lookup.variant(sizes_of(manifest, item.at("dims")));
    BOOST_TEST_CONTEXT(item.at("why").as_string()) {
      BOOST_TEST_REQUIRE(variant.has_value());
      BOOST_TEST(manifest.variants[*variant].name == std::string(item.at("variant").as_string()));
    }
  }
  for (const auto& item : vectors.at("unpadded").as_array()) {
    const Lookup lookup(manifest, item.at("threads").as_int64());
    json::array sizes;
    for (std::size_t d = 0; d < manifest.contract.dims.size(); ++d) {
      if (manifest.contract.dims[d].name != std::string(item.at("dim").as_string())) continue;
      for (const std::int64_t size : lookup.unpadded(d)) sizes.emplace_back(size);
    }
    BOOST_TEST(sizes == item.at("sizes").as_array());
  }
}

std::vector<std::int64_t> integers(const json::value& list) {
  std::vector<std::int64_t> found;
  for (const auto& item : list.as_array()) found.push_back(item.as_int64());
  return found;
}

BOOST_AUTO_TEST_CASE(padding_vectors) {
  const json::value vectors = mctl::vectors("contract/lookup.json");
  for (const auto& item : vectors.at("padded").as_array()) {
    const auto got = padded(item.at("size").as_int64(), integers(item.at("buckets")), integers(item.at("unpadded")));
    BOOST_TEST(got == item.at("padded").as_int64(), item.at("why").as_string());
  }
}

BOOST_AUTO_TEST_CASE(without_a_choice_the_first_variant_runs) {
  json::value vectors = mctl::vectors("contract/lookup.json");
  for (const char* left : {R"({"machine": {"cpu": "", "cores": 1}, "noise": 0, "choices": []})", "null"}) {
    vectors.at("manifest").as_object()["tuning"] = json::parse(left);
    const Manifest manifest = read(vectors.at("manifest"));
    const Lookup lookup(manifest, 1);
    BOOST_TEST(lookup.variant(DimSizes{1, 16}).value() == 0u);
    BOOST_TEST(!lookup.variant(DimSizes{9, 16}).has_value());
    BOOST_TEST(lookup.unpadded(0).empty());
  }
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace mctl
