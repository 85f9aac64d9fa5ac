// Inference requests and answers as the protocol's text says they look.
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstring>
#include <limits>

#include "doors/oip_answer.h"
#include "doors/oip_request.h"
#include "format/elements.h"
#include "support.h"

namespace mctl {
namespace {

Contract contract_of(Dtype dtype = Dtype::f32) {
  Contract contract;
  contract.dims = {{"batch", 1, 8, 1}};
  const auto axis = [&](std::string_view text) { return *Expression::parse(text, contract.dims); };
  contract.inputs = {{"x", dtype, {axis("batch"), Expression::fixed(2)}, std::nullopt, std::nullopt}};
  contract.outputs = {{"y", dtype, {axis("batch")}, std::nullopt, std::nullopt},
                      {"z", dtype, {axis("batch")}, std::nullopt, std::nullopt}};
  contract.constants = {{"k", std::int64_t{2}}};
  contract.batch_dim = 0;
  return contract;
}

Result<InferRequest> parse(const std::string& body, std::optional<std::uint64_t> json_length = std::nullopt,
                           Dtype dtype = Dtype::f32) {
  static std::string kept;  // what is parsed has views into its body
  kept = body;
  return parse_infer(contract_of(dtype), bytes_of(kept), json_length, 16);
}

template <class T>
std::vector<T> values(const InferRequest::Input& input) {
  std::vector<T> all(input.data.size() / sizeof(T));
  std::memcpy(all.data(), input.data.data(), input.data.size());
  return all;
}

std::string with_input(const std::string& fields) { return R"({"inputs":[{"name":"x",)" + fields + "}]}"; }
std::string with_data(const std::string& shape, const std::string& data, const std::string& type = "FP32") {
  return with_input(R"("shape":)" + shape + R"(,"datatype":")" + type + R"(","data":)" + data);
}

template <class T>
void expect_values(const std::string& body, Dtype dtype, std::vector<T> wanted) {
  const auto request = parse(body, std::nullopt, dtype);
  BOOST_REQUIRE_MESSAGE(request, why(request));
  BOOST_TEST(values<T>(request->inputs.at(0)) == wanted, boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(oip_json_data_flat_nested_and_in_any_order) {
  const std::vector<float> wanted = {1, -2.5, 0.1f, 1e20f};
  expect_values(with_data("[2,2]", "[1,-2.5,0.1,1e20]"), Dtype::f32, wanted);
  expect_values(with_data("[2,2]", "[[1,-2.5],[0.1,1e20]]"), Dtype::f32, wanted);
  expect_values(with_input(R"("data":[[1,-2.5],[0.1,1e20]],"datatype":"FP32","shape":[2,2])"), Dtype::f32, wanted);
}

BOOST_AUTO_TEST_CASE(oip_json_numbers_of_every_kind) {
  expect_values<std::uint64_t>(with_data("[1,2]", "[18446744073709551615,3.0]", "UINT64"), Dtype::u64,
                               {std::numeric_limits<std::uint64_t>::max(), 3});
  expect_values<std::int8_t>(with_data("[1,2]", "[-128,127]", "INT8"), Dtype::i8, {-128, 127});
  expect_values<std::uint8_t>(with_data("[2,2]", "[true,false,1,0]", "BOOL"), Dtype::boolean, {1, 0, 1, 0});
  expect_values<double>(with_data("[1,2]", "[0.1,5e-324]", "FP64"), Dtype::f64, {0.1, 5e-324});
  // binary16 by Python's struct; bfloat16 is the upper half of a float, rounded to even.
  expect_values<std::uint16_t>(with_data("[3,2]", "[2049,2051,5.9604644775390625e-08,0.1,-6.1e-5,65519]", "FP16"),
                               Dtype::f16, {0x6800, 0x6802, 0x0001, 0x2e66, 0x83ff, 0x7bff});
  expect_values<std::uint16_t>(with_data("[1,2]", "[1.00390625,1.01171875]", "BF16"), Dtype::bf16, {0x3f80, 0x3f82});
  const auto zero = parse(with_data("[1,2]", "[-0,-0.0]"));
  BOOST_TEST(std::signbit(values<float>(zero->inputs[0])[0]));
}

BOOST_AUTO_TEST_CASE(oip_json_refusals) {
  const std::string document =
      R"(the request is not an object: {"inputs":[{"name":"...","shape":[...],"datatype":"FP32","data":[...]}]})";
  const std::vector<std::array<std::string, 2>> cases = {
      {with_data("[1,2]", "[1]"), "input 'x': data has 1 elements, its shape is [1,2]"},
      {with_data("[1,2]", "[[1],[2]]"), "input 'x': data has lists of shape [2,1], its shape is [1,2]"},
      {with_data("[2,2]", "[[1,2],[3]]"), "input 'x': data is ragged: lists of 2 and 1 items side by side"},
      {with_data("[1,2]", "[1,1e39]"), "input 'x': data: element 1 is no FP32"},
      {with_data("[1,2]", "[1,1e999]"), "input 'x': data: element 1 is no FP32"},
      {with_data("[1,2]", "[1,\"2\"]"), "input 'x': data is not a list of numbers"},
      {with_data("[1,2]", "[1,null]"), "input 'x': data is not a list of numbers"},
      {with_data("[1,2]", "[1,true]"), "input 'x': data: element 1 is no FP32"},
      {with_data("[1,-2]", "[1,2]"), "input 'x': shape is not a list of sizes"},
      {with_data("[4294967296,4294967296]", "[1]"), "input 'x': shape [4294967296,4294967296] is too large"},
      {with_data("[1,2]", "[1,2]", "BYTES"), "input 'x': datatype 'BYTES' is not supported"},
      {with_input(R"("shape":[1,2],"datatype":"FP32")"), "input 'x' has no data"},
      {with_input(R"("shape":[1,2],"shape":[1,2])"), "key 'shape' twice"},
      {R"({"inputs":[{"shape":[1]}]})", "input 0 has no name"},
      {R"({"inputs":[],"id":1})", "id is not a string"},
      {R"({"inputs":[],"outputs":[{"name":"nope"}]})", "unknown output 'nope'"},
      {R"({"inputs":[],"outputs":[{"name":"y"},{"name":"y"}]})", "output 'y' is asked for twice"},
      {R"({"inputs":[],"parameters":{"timeout":0}})", "parameter 'timeout' is not a positive number of microseconds"},
      {"[]", document},
      {"[[1,2,3]]", document},
      {"1", document},
      {R"("x")", document},
      {R"({"inputs":[[1,2]]})", "an item of inputs is not an object"},
      {R"({"inputs":[1]})", "an item of inputs is not an object"},
      {R"({"inputs":{"x":[1]}})", "inputs is not a list of objects"},
      {R"({"data":[[1,2]]})", "data is not a key of a request: those are id, inputs, outputs and parameters"},
      {R"({"inputs":7})", "inputs is not a list of objects"},
      {with_input(R"("shape":2)"), "input 'x': shape is not a list of sizes"},
      {with_input(R"("data":2)"), "input 'x': data is not a list of numbers"},
      {with_input(R"("datatype":["FP32"])"), "input 'x': datatype is not a string"},
  };
  for (const auto& [body, message] : cases) BOOST_TEST(why(parse(body)) == message);
  for (const std::string body : {"", "{", "{}x", "nope", "{\"id\":\"\xff\"}", "{\"inputs\":[NaN]}"}) {
    BOOST_TEST(why(parse(body)).starts_with("malformed JSON: "));
  }
  BOOST_TEST(why(parse(with_data("[9999,2]", std::string(9999, '[')))).starts_with("malformed JSON: "));
  BOOST_TEST(!parse(with_data("[1,2]", "[1.5,2]", "INT32"), std::nullopt, Dtype::i32));
  std::string many = "[0";
  for (int i = 1; i < 100; ++i) many += ",0";
  const auto large = parse(with_data("[50,2]", many + "]"));
  BOOST_REQUIRE_MESSAGE(large, why(large));
  BOOST_TEST(large->inputs[0].data.empty());
}

BOOST_AUTO_TEST_CASE(oip_extensions_that_are_not_there) {
  const std::string tensor = R"("datatype":"FP32","shape":[1,2],"parameters":{"shared_memory_region":"r"})";
  for (const std::string& body : {with_input(tensor), std::string(R"({"parameters":{"sequence_id":7}})"),
                                  std::string(R"({"outputs":[{"parameters":{"classification":3}}]})")}) {
    const auto request = parse(body);
    BOOST_REQUIRE(!request);
    BOOST_TEST((request.error().code == Code::unimplemented));
  }
  BOOST_TEST(
      why(parse(R"({"inputs":[],"parameters":{"sequence_id":0,"priority":3,"other":{"deep":[1]}},"more":[{}]})")) ==
      "");
}

BOOST_AUTO_TEST_CASE(oip_binary_tensors) {
  const float data[] = {1, 2};
  const std::string raw(reinterpret_cast<const char*>(data), sizeof data);
  const auto json = [](const std::string& size) {
    return with_input(R"("shape":[1,2],"datatype":"FP32","parameters":{"binary_data_size":)" + size + "}");
  };
  const auto request = parse(json("8") + raw, json("8").size());
  BOOST_REQUIRE_MESSAGE(request, why(request));
  BOOST_TEST(values<float>(request->inputs[0])[1] == 2);
  BOOST_TEST(why(parse(json("4") + raw, json("4").size())) ==
             "input 'x': binary_data_size is 4, FP32 of shape [1,2] has 8");
  BOOST_TEST(why(parse(json("8") + "1234", json("8").size())) == "input 'x': the body ends before its 8 bytes");
  BOOST_TEST(why(parse(json("8") + raw + "!", json("8").size())) == "the body is 1 bytes longer than its tensors");
  BOOST_TEST(!parse(json("8"), json("8").size() + 1));
}

BOOST_AUTO_TEST_CASE(oip_raw_request) {
  const auto request = parse(std::string(24, '\0'), 0);
  BOOST_REQUIRE_MESSAGE(request, why(request));
  BOOST_TEST(request->inputs[0].shape == (std::vector<std::int64_t>{3, 2}), boost::test_tools::per_element());
  BOOST_TEST(request->outputs[0].binary);
  BOOST_TEST(why(parse(std::string(23, '\0'), 0)) == "input 'x': the body has 23 bytes, no float32[batch,2]");
  BOOST_TEST(why(parse(std::string(2, '\2'), 0, Dtype::boolean)) == "input 'x': element 0 is 2, allowed 0 or 1");
}

BOOST_AUTO_TEST_CASE(oip_names_outputs_and_parameters) {
  const auto request = parse(
      R"({"id":"a","inputs":[{"name":"INPUT__0","shape":[1,2],"datatype":"FP32","data":[1,2]}],
          "outputs":[{"name":"OUTPUT__1"},{"name":"y","parameters":{"binary_data":false}}],
          "parameters":{"binary_data_output":true,"k":5,"timeout":2000}})");
  BOOST_REQUIRE_MESSAGE(request, why(request));
  BOOST_TEST(*request->id == "a");
  BOOST_TEST(request->inputs[0].name == "x");
  BOOST_TEST(request->outputs[0].index == 1u);
  BOOST_TEST(request->outputs[0].name == "OUTPUT__1");
  BOOST_TEST(request->outputs[0].binary);
  BOOST_TEST(!request->outputs[1].binary);
  BOOST_TEST(request->parameters.at(0).first == "k");
  BOOST_TEST((request->parameters.at(0).second == Scalar(std::int64_t{5})));
  BOOST_TEST(*request->timeout_us == 2000);
}

BOOST_AUTO_TEST_CASE(oip_answers) {
  const Contract contract = contract_of();
  const float first[] = {0.1f, 1e20f}, second[] = {-1, std::numeric_limits<float>::quiet_NaN()};
  const std::vector<OutputView> outputs = {{{2}, std::as_bytes(std::span(first))},
                                           {{2}, std::as_bytes(std::span(second))}};
  InferRequest request;
  request.id = "a\"b";
  request.outputs = {{0, "y", false}};
  const auto json = answer_infer("m", "1", contract, request, outputs);
  BOOST_REQUIRE(json);
  BOOST_TEST(json->body == R"({"id":"a\"b","model_name":"m","model_version":"1","outputs":[)"
                           R"({"name":"y","datatype":"FP32","shape":[2],"data":[0.1,1e+20]}]})");
  request.outputs = {{0, "y", false}, {1, "z", true}};
  const auto mixed = answer_infer("m", "1", contract, request, outputs);
  BOOST_REQUIRE(mixed);
  const std::size_t length = mixed->body.size() - 8;
  BOOST_TEST(mixed->fields == "Inference-Header-Content-Length: " + std::to_string(length) + "\r\n");
  BOOST_TEST(std::memcmp(mixed->body.data() + length, second, 8) == 0);
  request.outputs = {{1, "z", false}};
  const auto none = answer_infer("m", "1", contract, request, outputs);
  BOOST_REQUIRE(!none);
  BOOST_TEST((none.error().code == Code::unsayable));
}

BOOST_AUTO_TEST_CASE(oip_elements_as_text) {
  const auto text = [](Dtype dtype, auto... values) {
    const std::array data{values...};
    std::string out;
    BOOST_TEST(!append_elements(out, dtype, std::as_bytes(std::span(data))));
    return out;
  };
  BOOST_TEST(text(Dtype::i64, std::numeric_limits<std::int64_t>::min(), std::int64_t{7}) == "-9223372036854775808,7");
  BOOST_TEST(text(Dtype::u8, std::uint8_t{255}) == "255");
  BOOST_TEST(text(Dtype::boolean, std::uint8_t{1}, std::uint8_t{0}) == "true,false");
  BOOST_TEST(text(Dtype::f16, std::uint16_t{0x3c00}, std::uint16_t{0x0001}) == "1,5.9604645e-08");
  BOOST_TEST(text(Dtype::bf16, std::uint16_t{0xc020}) == "-2.5");
  BOOST_TEST(text(Dtype::f64, 0.1, -2.2250738585072014e-308) == "0.1,-2.2250738585072014e-308");
  BOOST_TEST(text(Dtype::f32, -0.0F, 0.0F) == "-0.0,0");  // "-0" would be read as the integer 0
}

}  // namespace
}  // namespace mctl
