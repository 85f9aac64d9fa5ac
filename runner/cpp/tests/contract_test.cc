// The vectors of tests/vectors/contract, which Python's implementation runs too.
#include "format/contract.h"

#include <boost/test/unit_test.hpp>
#include <chrono>
#include <cstring>

#include "format/contract_json.h"
#include "support.h"

namespace mctl {
namespace {

namespace json = boost::json;

std::vector<std::int64_t> sizes(const json::value& list) { return json::value_to<std::vector<std::int64_t>>(list); }

Contract contract_of(const json::value& value) {
  std::string fault;
  Contract contract = contract_from_json(value, fault);
  BOOST_REQUIRE_EQUAL(fault, "");
  const auto sound = validate(contract);
  BOOST_REQUIRE_MESSAGE(sound, why(sound));
  return contract;
}

// One or two values, as little-endian elements of the dtype.
std::string elements(Dtype dtype, const json::object& input) {
  std::string bytes;
  for (const auto* end : {"low", "high"}) {
    const auto* value = input.if_contains(end);
    if (value == nullptr) return {};
    const std::uint64_t bits = value->is_uint64() ? value->get_uint64() : static_cast<std::uint64_t>(value->as_int64());
    bytes.append(reinterpret_cast<const char*>(&bits), item_size(dtype));
  }
  return bytes;
}

Scalar scalar_of(const json::value& value) {
  if (value.is_null()) return std::monostate{};
  if (value.is_bool()) return value.get_bool();
  if (value.is_double()) return value.get_double();
  if (value.is_string()) return std::string(value.get_string());
  return value.as_int64();
}

// The inputs of a case, kept together with what the spans of `given` look at.
struct Inputs {
  std::vector<std::string> names, data;
  std::vector<std::vector<std::int64_t>> shapes;
  std::vector<Given> given;

  explicit Inputs(const json::object& inputs) {
    for (const auto& [name, value] : inputs) {
      const auto& input = value.as_object();
      const Dtype dtype = *dtype_from_name(std::string_view(input.at("dtype").as_string()));
      names.emplace_back(name);
      shapes.push_back(sizes(input.at("shape")));
      data.push_back(elements(dtype, input));
      given.push_back({"", dtype, {}, {}});
    }
    for (std::size_t i = 0; i < given.size(); ++i) given[i] = {names[i], given[i].dtype, shapes[i], bytes_of(data[i])};
  }
};

Result<DimSizes> run(const Contract& contract, const json::object& test, const Inputs& inputs) {
  std::optional<std::int64_t> max_rows;
  if (const auto* rows = test.if_contains("max_rows")) max_rows = rows->as_int64();
  std::vector<std::size_t> order;
  auto dims = check(contract, inputs.given, order, max_rows);
  const auto* constants = test.if_contains("constants");
  if (!dims || constants == nullptr) return dims;
  for (const Constant& constant : contract.constants)  // the contract's own are looked at first
    if (const auto* given = constants->as_object().if_contains(constant.name))
      if (auto same = check_constant(contract, constant.name, scalar_of(*given)); !same) return same.error();
  for (const auto& [name, value] : constants->as_object())
    if (auto same = check_constant(contract, name, scalar_of(value)); !same) return same.error();
  return dims;
}

void expect_outputs(const Contract& contract, const DimSizes& dims, const json::object& expect) {
  for (const Tensor& output : contract.outputs) {
    const auto shape = shape_of(output, dims);
    if (const auto* shapes = expect.if_contains("outputs"); shapes && shapes->as_object().contains(output.name))
      BOOST_TEST((shape && *shape == sizes(shapes->as_object().at(output.name))), output.name);
    if (const auto* errors = expect.if_contains("output_errors"); errors && errors->as_object().contains(output.name))
      BOOST_TEST((!shape && shape.error().text == errors->as_object().at(output.name).as_string()), output.name);
  }
}

BOOST_AUTO_TEST_SUITE(contract_)

BOOST_AUTO_TEST_CASE(check_vectors) {
  int cases = 0;
  const auto groups = vectors("contract/check.json");
  for (const auto& group : groups.as_array()) {
    const Contract contract = contract_of(group.at("contract"));
    for (const auto& item : group.at("cases").as_array()) {
      const auto& test = item.as_object();
      BOOST_TEST_CONTEXT(group.at("name").as_string() << ": " << test.at("name").as_string()) {
        const auto& expect = test.at("expect").as_object();
        const Inputs inputs(test.at("inputs").as_object());
        const auto dims = run(contract, test, inputs);
        ++cases;
        if (const auto* error = expect.if_contains("error")) {
          BOOST_TEST_REQUIRE(!dims);
          BOOST_TEST(dims.error().text == error->as_string());
          BOOST_TEST((dims.error().code == Code::invalid));
          continue;
        }
        BOOST_REQUIRE_MESSAGE(dims, why(dims));
        for (std::size_t i = 0; i < contract.dims.size(); ++i)
          BOOST_TEST((*dims)[i] == expect.at("dims").at(contract.dims[i].name).as_int64());
        expect_outputs(contract, *dims, expect);
      }
    }
  }
  BOOST_TEST(cases > 80);
}

BOOST_AUTO_TEST_CASE(expression_vectors) {
  const auto tests = vectors("contract/expressions.json");
  for (const auto& item : tests.as_array()) {
    std::vector<Dim> dims;
    DimSizes bound;
    for (const auto& [name, size] : item.at("dims").as_object()) {
      dims.push_back({name, 1, std::int64_t{1} << 62, 1});
      bound.push_back(size.as_int64());
    }
    const std::string text(item.at("text").as_string());
    BOOST_TEST_CONTEXT(text) {
      const auto expression = Expression::parse(text, dims);
      const auto* error = item.as_object().if_contains("error");
      if (error == nullptr) {
        BOOST_REQUIRE_MESSAGE(expression, why(expression));
        BOOST_TEST((expression->evaluate(bound) == item.at("value").as_int64()));
      } else if (!expression) {
        BOOST_TEST(expression.error().text == error->as_string());
      } else {
        BOOST_TEST(!expression->evaluate(bound));
        BOOST_TEST(expression->fault(bound) == error->as_string());
      }
    }
  }
}

BOOST_AUTO_TEST_CASE(bounds_hold_every_value) {
  const std::vector<Dim> dims{{"n", 2, 9, 1}, {"m", 1, 5, 1}};
  for (const auto* text : {"n", "2*n+1", "9-n", "n*m-3", "n//m", "(n-5)*(m-3)", "-n//2", "n//(0-m)"}) {
    const auto expression = Expression::parse(text, dims);
    BOOST_REQUIRE(expression);
    const auto bounds = expression->bounds(dims);
    BOOST_REQUIRE(bounds);
    for (std::int64_t n = 2; n <= 9; ++n)
      for (std::int64_t m = 1; m <= 5; ++m) {
        const auto value = expression->evaluate(std::vector{n, m});
        BOOST_TEST((value && bounds->low <= *value && *value <= bounds->high), text);
      }
  }
  BOOST_TEST(!Expression::parse("n//(m-3)", dims)->bounds(dims));
  BOOST_TEST(Expression::parse("9-n", dims)->bounds(dims)->high == 7);
}

BOOST_AUTO_TEST_CASE(rows_of_an_output) {
  const std::vector<Dim> dims{{"batch", 1, 8, 1}, {"seq", 1, 8, 1}};
  const std::pair<const char*, std::int64_t> known[] = {
      {"batch", 1},    {"2*batch", 2},    {"batch*3", 3},    {"2 * batch*3", 6}, {"seq", -1},       {"7", -1},
      {"batch+1", -1}, {"(batch)*2", -1}, {"batch*seq", -1}, {"0*batch", -1},    {"2*3*batch", -1}, {"-batch", -1}};
  for (const auto& [text, rows] : known) {
    const Tensor output{"y", Dtype::f32, {*Expression::parse(text, dims)}, {}, {}};
    BOOST_TEST(rows_per_item(output, 0).value_or(-1) == rows, text);
  }
}

BOOST_AUTO_TEST_CASE(an_input_given_twice_is_refused) {
  const Contract contract = contract_of(vectors("contract/check.json").at(0).at("contract"));
  const std::int64_t shape[] = {1, 128};
  const std::vector<Given> given(2, {"x", Dtype::f32, shape, {}});
  std::vector<std::size_t> order;
  BOOST_TEST(check(contract, given, order).error().text == "input 'x' is there twice");
}

BOOST_AUTO_TEST_CASE(a_check_takes_well_under_a_microsecond) {
  const Contract contract = contract_of(vectors("contract/check.json").at(1).at("contract"));
  const std::int64_t shape[] = {8, 128};
  const std::vector<Given> given{{"input_ids", Dtype::i64, shape, {}}, {"attention_mask", Dtype::i64, shape, {}}};
  std::vector<std::size_t> order;
  std::chrono::nanoseconds best{1'000'000'000};
  constexpr int calls = 100;
  bool sound = true;
  for (int round = 0; round < 500; ++round) {
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < calls; ++i) sound &= static_cast<bool>(check(contract, given, order));
    best = std::min<std::chrono::nanoseconds>(best, (std::chrono::steady_clock::now() - begin) / calls);
  }
  BOOST_TEST(sound);
  BOOST_TEST_MESSAGE("check: " << best.count() << " ns");
#ifdef __OPTIMIZE__
  BOOST_TEST(best.count() < 1000);
#endif
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace mctl
