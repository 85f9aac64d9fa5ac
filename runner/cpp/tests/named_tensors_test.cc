// Tensors as plain JSON, there and back.
#include "doors/named_tensors.h"

#include <boost/test/unit_test.hpp>

#include "doors/oip_request.h"
#include "tests/support.h"

namespace mctl {
namespace {

Contract contract() {
  Contract made;
  for (const auto& [name, dtype] : {std::pair("x", Dtype::f32), std::pair("mask", Dtype::boolean)}) {
    Tensor tensor;
    tensor.name = name;
    tensor.dtype = dtype;
    made.inputs.push_back(tensor);
  }
  Tensor y;
  y.name = "y";
  y.dtype = Dtype::i64;
  made.outputs.push_back(y);
  return made;
}

std::string converted(std::string_view body) {
  const auto made = infer_body_from(contract(), body);
  return made ? *made : "refused";
}

BOOST_AUTO_TEST_CASE(named_tensors_get_dtypes_of_the_contract_and_shapes_of_their_lists) {
  BOOST_TEST(converted(R"( {"x": [[1, 2.5], [3, 4]], "mask": [ true ,false]} )") ==
             R"({"inputs":[{"name":"x","datatype":"FP32","shape":[2,2],"data":[[1, 2.5], [3, 4]]},)"
             R"({"name":"mask","datatype":"BOOL","shape":[2],"data":[ true ,false]}]})");
  BOOST_TEST(converted(R"({"x": 7})") == R"({"inputs":[{"name":"x","datatype":"FP32","shape":[],"data":[7]}]})");
  BOOST_TEST(converted(R"({"x":[]})") == R"({"inputs":[{"name":"x","datatype":"FP32","shape":[0],"data":[]}]})");
  BOOST_TEST(converted(R"({"x":[[],[]]})") ==
             R"({"inputs":[{"name":"x","datatype":"FP32","shape":[2,0],"data":[[],[]]}]})");
  BOOST_TEST(converted(R"({"x":[[[1]],[[2]],[[3]]]})").find("\"shape\":[3,1,1]") != std::string::npos);
  BOOST_TEST(converted("{}") == R"({"inputs":[]})");
}

BOOST_AUTO_TEST_CASE(requests_of_the_protocol_stay_as_they_are) {
  const std::string_view body = R"({"id":"a","inputs":[{"name":"x","shape":[1],"datatype":"FP32","data":[1]}]})";
  BOOST_TEST(converted(body) == body);
}

BOOST_AUTO_TEST_CASE(what_is_no_object_is_refused_and_the_rest_left_to_the_reader_of_requests) {
  for (const auto* text : {"", "[]", "7", "{", R"({"x")", R"({"x":)", R"({"x":[1)", R"({"x":[1]} more)", R"({x:[1]})",
                           R"({"x":[1],,})", R"({"x":"a)", R"({,})"}) {
    BOOST_TEST(converted(text) == "refused", text);
  }
  // Each of these is passed on, and refused as a request.
  for (const auto* text : {R"({"x":[[1],[2,3]]})", R"({"x":["a]"]})", R"({"x":[1}])", R"({"x":[1] "y":[2]})",
                           R"({"x":{"a":1}})", R"({"x":[nul]})", R"({"x":]})"}) {
    const auto made = infer_body_from(contract(), text);
    const bool fine = made && parse_infer(contract(), bytes_of(std::string_view(*made)), {}, 16);
    BOOST_TEST(!fine, text);
  }
}

BOOST_AUTO_TEST_CASE(outputs_are_nested_as_they_are_shaped) {
  const std::int64_t numbers[] = {1, 2, 3, 4, 5, 6};
  const auto said = [&](std::vector<std::int64_t> shape, std::size_t count) {
    const OutputView view{std::move(shape), std::as_bytes(std::span(numbers).first(count))};
    return answer_by_name(contract(), std::span(&view, 1))->body;
  };
  BOOST_TEST(said({2, 3}, 6) == R"({"y":[[1,2,3],[4,5,6]]})");
  BOOST_TEST(said({1, 2, 1}, 2) == R"({"y":[[[1],[2]]]})");
  BOOST_TEST(said({}, 1) == R"({"y":1})");
  BOOST_TEST(said({0}, 0) == R"({"y":[]})");
  BOOST_TEST(said({0, 3}, 0) == R"({"y":[]})");
  BOOST_TEST(said({2, 0}, 0) == R"({"y":[[],[]]})");
  Contract floats = contract();
  floats.outputs[0].dtype = Dtype::f32;
  const float odd[] = {1, __builtin_nanf("")};
  const OutputView view{{2}, std::as_bytes(std::span(odd))};
  BOOST_TEST(why(answer_by_name(floats, std::span(&view, 1))).find("output 'y' holds NaN") == 0);
}

}  // namespace
}  // namespace mctl
