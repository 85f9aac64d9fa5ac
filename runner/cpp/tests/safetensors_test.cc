// Format: https://github.com/huggingface/safetensors#format
#include "format/safetensors.h"

#include <boost/test/unit_test.hpp>

#include "small_bundle.h"
#include "support.h"

namespace mctl {
namespace {

std::string fault(std::string bytes) { return why(read_tensors(std::as_writable_bytes(std::span(bytes)))); }

std::string header(const std::string& json, std::size_t size) {
  return fault(safetensors_of(json, std::string(size, 'd')));
}

BOOST_AUTO_TEST_SUITE(safetensors_)

BOOST_AUTO_TEST_CASE(tensors_are_found) {
  std::string bytes = safetensors_of(R"({"__metadata__": {"by": "hand"},
      "b": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [64, 76]},
      "a": {"dtype": "F64", "shape": [], "data_offsets": [0, 8]},
      "none": {"dtype": "I8", "shape": [0, 5], "data_offsets": [64, 64]},
      ".pad/0": {"dtype": "U8", "shape": [56], "data_offsets": [8, 64]}})",
                                     std::string(64, 'a') + std::string(12, 'b'));
  const auto tensors = read_tensors(std::as_writable_bytes(std::span(bytes)));
  BOOST_REQUIRE_MESSAGE(tensors, why(tensors));
  BOOST_TEST(tensors->size() == 3u);
  const StoredTensor& b = tensors->find("b")->second;
  BOOST_TEST((b.dtype == Dtype::bf16));
  BOOST_TEST(b.shape == (std::vector<std::int64_t>{2, 3}));
  BOOST_TEST(b.data.size() == 12u);
  BOOST_TEST(static_cast<char>(b.data[0]) == 'b');
  BOOST_TEST(tensors->find("none")->second.data.empty());
}

BOOST_AUTO_TEST_CASE(what_does_not_fit) {
  const std::string misfit = "tensor `a` has a shape and offsets that do not fit";
  BOOST_TEST(header(R"({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}})", 4) == misfit);
  BOOST_TEST(header(R"({"a": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}})", 12) == misfit);
  BOOST_TEST(header(R"({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}})", 4) == misfit);
  BOOST_TEST(header(R"({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}})", 4) == misfit);
  BOOST_TEST(header(R"({"a": {"dtype": "F32", "shape": [4611686018427387904, 4], "data_offsets": [0, 0]}})", 0) ==
             misfit);
  BOOST_TEST(header(R"({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}})", 5) ==
             "bytes at the end belong to no tensor");
  BOOST_TEST(header(R"({"b": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
                        "a": {"dtype": "F32", "shape": [1], "data_offsets": [2, 6]}})",
                    6) == misfit);
  BOOST_TEST(header(R"({"b": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
                        "a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}})",
                    8) == "tensor `a` does not start on a boundary of 64 bytes");
}

BOOST_AUTO_TEST_CASE(headers_that_are_not_valid) {
  const std::string wrong = "the safetensors header is not valid: tensor `a`.";
  BOOST_TEST(header(R"({"a": {"dtype": "F8_E4M3", "shape": [1], "data_offsets": [0, 1]}})", 1) ==
             wrong + "dtype is not known");
  BOOST_TEST(header(R"({"a": {"dtype": "F32", "shape": [1]}})", 4) == wrong + "data_offsets is missing");
  BOOST_TEST(header(R"({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}})", 4) ==
             wrong + "data_offsets is no range");
  BOOST_TEST(header(R"({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], "x": 1}})", 4) ==
             wrong + "x is not known");
  BOOST_TEST(header(R"({"a": {"dtype": "F32", "shape": [1099511627776, 1099511627776, 0], "data_offsets": [0, 0]}})",
                    0) == "tensor `a` has a shape and offsets that do not fit");
  for (const std::string metadata : {"null", "1", "[]", R"({"a": 1})"})
    BOOST_TEST(header(R"({"__metadata__": )" + metadata + "}", 0) ==
               "the safetensors header is not valid: the metadata is no object of texts");
  BOOST_TEST(header("{\"a\": \"" + std::string(1'100'000, ':') + "\"}", 0) ==
             "the safetensors header names too many tensors");
  BOOST_TEST(header("[]", 0) == "the safetensors header is no object");
  BOOST_TEST(header("{", 0).starts_with("the safetensors header is not valid: it is not JSON"));
  BOOST_TEST(fault("") == "the safetensors header is cut");
  BOOST_TEST(fault(std::string(8, '\xff')) == "the safetensors header is cut or too large");
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace mctl
