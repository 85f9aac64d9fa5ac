// A manifest that is sound, and one fault at a time.
#include "format/manifest.h"

#include <algorithm>
#include <boost/algorithm/string/replace.hpp>
#include <boost/test/unit_test.hpp>

#include "format/json.h"
#include "format/layout.h"
#include "format/text.h"
#include "small_bundle.h"
#include "support.h"

namespace mctl {
namespace {

namespace json = boost::json;

std::string sound() { return small_members().back().second; }

// What reading says of the small manifest where the value at a JSON pointer is replaced; "-" takes it out.
std::string with(const std::string& pointer, const std::string& value) {
  json::value manifest = json::parse(sound());
  const std::size_t last = pointer.rfind('/');
  const std::string key = boost::replace_all_copy(pointer.substr(last + 1), "~1", "/");
  json::value& parent = manifest.at_pointer(pointer.substr(0, last));
  if (value == "-")
    parent.as_object().erase(key);
  else if (parent.is_object())
    parent.as_object()[key] = json::parse(value);
  else
    parent.as_array().at(std::stoul(key)) = json::parse(value);
  const std::string text = why(parse_manifest(json::serialize(manifest)));
  const std::string prefix = "the manifest is not valid: ";
  return text.starts_with(prefix) ? text.substr(prefix.size()) : text;
}

BOOST_AUTO_TEST_SUITE(manifest_)

BOOST_AUTO_TEST_CASE(a_sound_manifest_is_read) {
  const auto manifest = parse_manifest(sound());
  BOOST_REQUIRE_MESSAGE(manifest, why(manifest));
  const Contract& contract = manifest->contract;
  BOOST_TEST(manifest->name == "small");
  BOOST_TEST(manifest->torch == "2.13.0");
  BOOST_TEST(contract.dims.size() == 2u);
  BOOST_TEST(contract.dims[1].multiple == 4);
  BOOST_TEST(contract.inputs[0].pad.value() == 0.5);
  BOOST_TEST(contract.inputs[1].range->text() == "0..9");
  BOOST_TEST(contract.batch_dim.value() == 0u);
  BOOST_TEST((contract.constants[0].value == Scalar(std::int64_t{2})));
  BOOST_TEST(signature(contract.outputs[0]) == "float32[2*batch,n+1]");
  BOOST_TEST(manifest->buckets.at("batch") == (std::vector<std::int64_t>{1, 2, 8}));
  BOOST_TEST(manifest->variants[0].constants.find("w")->second.stride == (std::vector<std::int64_t>{1, 2}));
  BOOST_TEST(manifest->variants[0].constants.find("count")->second.state);
  BOOST_TEST(manifest->tolerances.at("y").rtol == 1e-4);
  BOOST_TEST(manifest->target.glibc == "2.17");
}

BOOST_AUTO_TEST_CASE(one_fault_at_a_time) {
  const struct {
    const char *pointer, *value, *fault;
  } faults[] = {
      {"/more", "1", "manifest.more is not known"},
      {"/name", "-", "manifest.name is missing"},
      {"/name", "3", "manifest.name is no text"},
      {"/name", R"("a b")", "name and version of the manifest have letters, digits, `_`, `.` and `-` only"},
      {"/schema", R"("mctl.bundle/3")",
       "it has the unknown manifest schema `mctl.bundle/3`: it was made by another version of mctl"},
      {"/needs", "[]", "only `mctl.bundle/2` has `needs`"},
      {"/schema", "-", "it has no schema"},
      {"/parity", R"("maybe")", "manifest.parity is none of the words that are known"},
      {"/standalone", "1", "manifest.standalone is no boolean"},
      {"/source/seed", "1.5", "source.seed is no integer of 64 bits"},
      {"/source/seed", "18446744073709551615", "it has a number beyond 64 bits"},
      {"/producer/flags", "{}", "producer.flags is no list"},
      {"/target", "null", "target is no object"},
      {"/target/color", "1", "target.color is not known"},
      {"/variants", "[]", "no variant covers the whole contract"},
      {"/variants/0/covers/batch", "[1, 4]", "no variant covers the whole contract"},
      {"/variants/0/covers/batch", "[0, 8]", "variant `dynamic` covers sizes of dim `batch` outside its range"},
      {"/variants/0/covers/batch", "[1]", "manifest.variants[0].covers.batch is no pair"},
      {"/variants/0/covers/n", "-", "variant `dynamic` does not say which sizes of each dim it covers"},
      {"/variants/0/library", R"("/etc/passwd")",
       "the manifest names `/etc/passwd`, which is not a member listed under `data/aotinductor/dynamic/`"},
      {"/variants/0/library", R"("mctl/weights.safetensors")",
       "the manifest names `mctl/weights.safetensors`, which is not a member listed under `data/aotinductor/dynamic/`"},
      {"/variants/0/constants/w/stride", R"(["1"])",
       "manifest.variants[0].constants.w.stride is no integer of 64 bits"},
      {"/members/mctl~1weights.safetensors", "-",
       "variant `dynamic` has constants, but the manifest lists no `mctl/weights.safetensors`"},
      {"/members/mctl~1weights.safetensors/size", "-1", "manifest.members.mctl/weights.safetensors.size is negative"},
      {"/golden/0/dims/n", "6", "golden case `first` does not give each dim a size inside its range"},
      {"/golden/0/dims/m", "1", "golden case `first` does not give each dim a size inside its range"},
      {"/golden/0/dims/n", "-", "golden case `first` does not give each dim a size inside its range"},
      {"/buckets/batch", "[1, 2]", "the buckets of dim `batch` do not end with its maximum, 8"},
      {"/buckets/batch", "[]", "the buckets of dim `batch` do not end with its maximum, 8"},
      {"/buckets/batch", "[2, 1, 8]", "the buckets of dim `batch` are not ascending sizes inside its range"},
      {"/buckets/batch", "[1, 1, 8]", "the buckets of dim `batch` are not ascending sizes inside its range"},
      {"/buckets/n", "[5, 16]", "the buckets of dim `n` are not ascending sizes inside its range"},
      {"/buckets/m", "[1]", "the buckets of dim `m` are not ascending sizes inside its range"},
      {"/tolerances/y/rtol", "-1", "the tolerance of output `y` is not sound"},
      {"/tolerances/z", R"({"rtol": 0, "atol": 0})", "the tolerance of output `z` is not sound"},
      {"/contract/random", "1", "contract.random is no boolean"},
      {"/contract/batch_dim", R"("m")", "contract.batch_dim is not declared"},
      {"/contract/batch_dim", R"("n")", "batch dim 'n': it has a multiple"},
      {"/contract/dims/0/min", "0", "dim 'batch' has no sound range: 0..8"},
      {"/contract/dims/0/max", "1", "dim 'batch' has no sound range: 1..1"},
      {"/contract/dims/0/max", "1099511627777", "dim 'batch' has no sound range: 1..1099511627777"},
      {"/contract/dims/1/multiple", "0", "dim 'n' has no sound range: 4..16"},
      {"/contract/dims/1/multiple", "3", "dim 'n' has no sound range: 4..16 in steps of 3"},
      {"/contract/inputs/0/dtype", R"("float8")", "contract.inputs[0].dtype is no dtype that is known"},
      {"/contract/inputs/0/name", R"("a/b")", "input name 'a/b' is not allowed: letters, digits, `_`, `.` and `-`"},
      {"/contract/inputs/0/name", R"("ids")", "input 'ids' is declared twice"},
      {"/contract/inputs/0/name", R"("k")", "input 'k' is declared twice"},
      {"/contract/inputs/0/shape", R"(["batch", "q"])",
       "contract.inputs[0].shape[1]: 'q' names a dim that is not declared"},
      {"/contract/inputs/0/shape", R"(["batch", "n+1"])", "contract.inputs[0].shape[1]: 'n+1' is no dim"},
      {"/contract/inputs/0/shape", R"(["batch", 4])", "no input has the dim 'n'"},
      {"/contract/inputs/0/shape", R"(["n", "batch"])", "batch dim 'batch': input 'x' has it on an axis other than 0"},
      {"/contract/inputs/0/shape", R"([-1])", "input 'x' has an axis of -1, allowed 0..1099511627776"},
      {"/contract/inputs/0/shape", "[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]", "input 'x' has 17 axes, allowed 16"},
      {"/contract/inputs/0/pad", "1e999", "it has a number beyond 64 bits"},
      {"/contract/inputs/0/pad", "1.5e308", "input 'x' has a pad value that float32 cannot hold"},
      {"/contract/inputs/1/pad", "1.5", "contract.inputs[1].pad is a value that the dtype cannot hold"},
      {"/contract/inputs/1/range", "[9, 0]", "input 'ids' has no sound value range: 9..0"},
      {"/contract/inputs/1/range", "[0]", "contract.inputs[1].range is no pair"},
      {"/contract/inputs/0/range", "[0, 1]", "input 'x' has no sound value range: 0..1"},
      {"/contract/outputs/0/shape/1", R"("n+")", "contract.outputs[0].shape[1]: malformed expression 'n+'"},
      {"/contract/outputs/0/shape/0", R"("batch+1")", "batch dim 'batch': output 'y' does not have it as axis 0"},
      {"/contract/outputs", "[]", "a contract has at least one input and one output"},
      {"/contract/state/0/shape", "[-1]", "state 'count' has an axis of -1, allowed 0..1099511627776"},
      {"/contract/dims", "{}", "contract.dims is no list"},
  };
  for (const auto& [pointer, value, fault] : faults)
    BOOST_TEST_CONTEXT(pointer << " = " << value) BOOST_TEST(with(pointer, value) == fault);
}

std::string changed(std::string text, const json::value& replace) {
  for (const auto& pair : replace.as_array()) {
    const std::string_view old = pair.at(0).as_string(), now = pair.at(1).as_string();
    const std::size_t at = text.find(old);
    BOOST_REQUIRE(at != std::string::npos);
    text.replace(at, old.size(), now);
  }
  return text;
}

bool is_plain(std::string_view text) {
  return text.size() < 1000 && std::ranges::none_of(text, [](unsigned char c) { return c < ' ' || c == 0x7f; });
}

BOOST_AUTO_TEST_CASE(manifest_vectors) {  // Python's reader runs them too
  const auto vectors = mctl::vectors("contract/manifests.json");
  const std::string base(vectors.at("base").as_string());
  int refused = 0;
  for (const auto& item : vectors.at("cases").as_array()) {
    BOOST_TEST_CONTEXT(item.at("name").as_string()) {
      const std::string text = changed(base, item.at("replace"));
      const auto manifest = parse_manifest(text);
      const bool is_program = text.find(kProgramSchema) != std::string::npos;
      if (item.at("accept").as_bool() && !is_program) {
        BOOST_TEST_REQUIRE(static_cast<bool>(manifest), why(manifest));
        BOOST_TEST(manifest->digest.size() == 64u);
        continue;
      }
      ++refused;
      BOOST_TEST_REQUIRE(!manifest);
      BOOST_TEST((manifest.error().code == (is_program ? Code::usage : Code::damaged)));
      BOOST_TEST(is_plain(why(manifest)), why(manifest));
    }
  }
  BOOST_TEST(refused > 200);
}

BOOST_AUTO_TEST_CASE(names_are_shown_without_escapes) {
  const std::string fault = with("/a\x1b[2J\xe2\x80\xae\xc3\xa9", "1");
  BOOST_TEST(fault == "manifest.a\\x1b[2J\\u202e\xc3\xa9 is not known");
  BOOST_TEST(printable("a\x1b[2J\n\xe2\x80\xae\xff\xc3\xa9") == "a\\x1b[2J\\x0a\\u202e\\xff\xc3\xa9");
  BOOST_TEST(printable(std::string(5000, 'x')).size() < 1000u);
}

BOOST_AUTO_TEST_CASE(what_is_no_json) {
  for (const std::string text : {"", "{", "nul", "[1,]", "\xff", "{\"a\":\"\xff\"}", "{} {}"})
    BOOST_TEST(why(parse_json(text)).starts_with("it is not JSON"), text);
  for (const std::string text : {"9223372036854775808", "-9223372036854775809", "[1, 123456789012345678901234567890]",
                                 "1e999", "-1.7976931348623159e308"})
    BOOST_TEST(why(parse_json(text)) == "it has a number beyond 64 bits", text);
  for (const std::string text : {"9223372036854775807", "-0", "[9223372036854775808.0, 1e-999]", "1E300"})
    BOOST_TEST(why(parse_json(text)).empty(), text);
  BOOST_TEST(why(parse_json(R"({"a": 1, "b": {"c": 1, "c": 2}})")) == "an object has the same key twice");
  BOOST_TEST(why(parse_json(R"([{"a": 1, "\u0061": 2}])")) == "an object has the same key twice");
  const auto nested = [](std::size_t depth) { return std::string(depth, '[') + std::string(depth, ']'); };
  BOOST_TEST(why(parse_json(nested(32))).empty());
  BOOST_TEST(why(parse_json(nested(33))) == "it nests more than 32 levels deep");
  BOOST_TEST(why(parse_manifest(std::string((16 << 20) + 1, ' '))) == "the manifest has 16777217 bytes");
}

BOOST_AUTO_TEST_CASE(a_program_is_told_apart) {
  const auto program = parse_manifest(R"({"schema": "mctl.program/1"})");
  BOOST_TEST((program.error().code == Code::usage));
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace mctl
