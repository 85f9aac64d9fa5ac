// Frames in all pieces, their limits, and what front and handler processes tell each other.
#include "pool/frame.h"

#include <boost/json.hpp>
#include <boost/test/unit_test.hpp>
#include <type_traits>

#include "format/expression.h"
#include "pool/handler_messages.h"
#include "tests/support.h"

namespace mctl {
namespace {

namespace json = boost::json;

std::string bytes_from_hex(std::string_view hex) {
  std::string bytes;
  for (std::size_t i = 0; i + 1 < hex.size(); i += 2) {
    bytes += static_cast<char>(std::stoi(std::string(hex.substr(i, 2)), nullptr, 16));
  }
  return bytes;
}

std::string hex_of(std::span<const std::byte> bytes) {
  std::string hex;
  for (const std::byte byte : bytes) {
    hex += "0123456789abcdef"[std::to_integer<int>(byte >> 4)];
    hex += "0123456789abcdef"[std::to_integer<int>(byte & std::byte{15})];
  }
  return hex;
}

std::string_view text_of(const json::value& value) { return value.as_string(); }

std::string text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

struct Read {
  std::string header, body;
  std::uint64_t size;
  bool skipped;
  bool operator==(const Read&) const = default;
};

// All frames of `bytes`, which come in pieces of this size.
std::vector<Read> read_in_pieces(FrameReader& reader, std::string_view bytes, std::size_t piece) {
  std::vector<Read> frames;
  while (!bytes.empty()) {
    const auto room = reader.room();
    const std::size_t count = std::min({piece, bytes.size(), room.size()});
    std::memcpy(room.data(), bytes.data(), count);
    reader.filled(count);
    bytes.remove_prefix(count);
    for (;;) {
      const auto frame = reader.next();
      BOOST_REQUIRE(frame);
      if (!*frame) break;
      frames.push_back(
          {std::string((*frame)->header), text_of((*frame)->body), (*frame)->body_size, (*frame)->skipped});
    }
  }
  return frames;
}

BOOST_AUTO_TEST_CASE(frames_have_the_bytes_of_the_vectors) {
  const auto file = vectors("handlers/frames.json");
  for (const auto& entry : file.at("frames").as_array()) {
    const std::string body = bytes_from_hex(text_of(entry.at("body")));
    const std::string whole = frame_start(text_of(entry.at("header")), body.size()) + body;
    BOOST_TEST(hex_of(bytes_of(whole)) == text_of(entry.at("bytes")));
  }
}

BOOST_AUTO_TEST_CASE(frames_are_the_same_in_all_pieces) {
  const std::string large(200'000, 'x');
  const std::vector<Read> sent = {
      {"{}", "ab", 2, false}, {"", "", 0, false}, {"{\"t\":1}", large, large.size(), false}, {"z", "", 0, false}};
  std::string bytes;
  for (const Read& frame : sent) bytes += frame_start(frame.header, frame.body.size()) + frame.body;
  for (const std::size_t piece : {std::size_t{1}, std::size_t{7}, std::size_t{65536}, bytes.size()}) {
    FrameReader reader(1 << 20);
    BOOST_TEST((read_in_pieces(reader, bytes, piece) == sent));
  }
}

BOOST_AUTO_TEST_CASE(a_body_that_is_too_large_is_left_out_and_the_next_frame_read) {
  const std::string body(100'001, 'x');
  const std::string bytes = frame_start("big", body.size()) + body + frame_start("next", 1) + "y";
  const std::vector<Read> expected = {{"big", "", 100'001, true}, {"next", "y", 1, false}};
  for (const std::size_t piece : {std::size_t{1}, std::size_t{4096}, bytes.size()}) {
    FrameReader reader(100'000);
    BOOST_TEST((read_in_pieces(reader, bytes, piece) == expected));
    BOOST_TEST(reader.room().size() <= std::size_t{64 << 10});  // no room was made for what is left out
  }
}

BOOST_AUTO_TEST_CASE(lengths_over_the_limit_are_no_frames) {
  const auto refused = [](std::uint32_t header, std::uint64_t body) {
    std::string bytes(12, '\0');
    std::memcpy(bytes.data(), &header, 4);
    std::memcpy(bytes.data() + 4, &body, 8);
    FrameReader reader(1024);
    std::memcpy(reader.room().data(), bytes.data(), bytes.size());
    reader.filled(bytes.size());
    return why(reader.next());
  };
  BOOST_TEST(refused((1 << 20) + 1, 0) == "a frame's header has 1048577 bytes");
  BOOST_TEST(refused(1, (1ULL << 30) + 1) == "a frame's body has 1073741825 bytes");
  BOOST_TEST(refused(1, ~0ULL) == "a frame's body has 18446744073709551615 bytes");
  BOOST_TEST(refused(1 << 20, 1ULL << 30) == "");
}

// --- messages

json::value value_of(const HeaderLines& lines) {
  json::array list;
  for (const auto& [name, value] : lines) list.push_back(json::array{name, value});
  return list;
}

json::object described(const HandlerReady& ready) {
  json::array routes;
  for (const auto& route : ready.routes) routes.push_back(json::array{route.method, route.path});
  return {{"kind", "ready"}, {"routes", routes}, {"python", ready.python}};
}
json::object described(const HandlerFailed& failed) {
  return {{"kind", "failed"}, {"error", failed.error}, {"trace", failed.trace}};
}
json::object described(const HandlerCall& call) {
  json::array inputs;
  for (const HandlerTensor& tensor : call.inputs) {
    inputs.push_back(
        json::array{tensor.name, oip_name_of(tensor.dtype), json::value_from(tensor.shape), hex_of(tensor.data)});
  }
  json::value timeout = nullptr;
  if (call.timeout_ms) timeout = *call.timeout_ms;
  return {{"kind", "call"},          {"id", call.id},         {"call", call.call}, {"model", call.model},
          {"version", call.version}, {"timeout_ms", timeout}, {"inputs", inputs}};
}
json::object described(const HandlerUncall& call) { return {{"kind", "uncall"}, {"id", call.id}, {"call", call.call}}; }
json::object described(const HandlerAnswer& answer, std::string_view kind = "answer") {
  return {{"kind", kind}, {"id", answer.id}, {"status", answer.status}, {"headers", value_of(answer.headers)}};
}
json::object described(const StreamStart& start) {
  return described(static_cast<const HandlerAnswer&>(start), "start");
}
json::object described(const StreamPart& part) { return {{"kind", "part"}, {"id", part.id}}; }
json::object described(const StreamEnd& end) { return {{"kind", "end"}, {"id", end.id}}; }
json::object described(const StreamBreak& end) { return {{"kind", "break"}, {"id", end.id}, {"error", end.error}}; }
json::object described(const HandlerPong& pong) { return {{"kind", "pong"}, {"number", pong.number}}; }

// Numbers as they are in the vectors, whatever type they have here.
json::value plain(const json::object& object) { return json::parse(json::serialize(object)); }

BOOST_AUTO_TEST_CASE(messages_of_handlers_are_read_as_the_vectors_say) {
  const auto file = vectors("handlers/frames.json");
  for (const auto& entry : file.at("from_handler").as_array()) {
    const std::string body = bytes_from_hex(text_of(entry.at("body")));
    const auto message = parse_from_handler(text_of(entry.at("header")), bytes_of(body));
    BOOST_TEST_CONTEXT(text_of(entry.at("header"))) {
      if (entry.as_object().contains("error")) {
        BOOST_REQUIRE(!message);
        BOOST_TEST(message.error().text.find(text_of(entry.at("error"))) != std::string::npos, message.error().text);
        continue;
      }
      BOOST_REQUIRE_MESSAGE(message, why(message));
      const auto found = std::visit([](const auto& any) { return described(any); }, *message);
      BOOST_TEST(plain(found) == entry.at("message"));
    }
  }
}

BOOST_AUTO_TEST_CASE(a_call_whose_body_was_left_out_has_tensors_without_bytes) {
  const std::string header =
      R"({"t":"call","id":1,"call":2,"inputs":[{"name":"x","dtype":"FP32","shape":[1000000,1000]}]})";
  const auto message = parse_from_handler(header, std::nullopt);
  BOOST_REQUIRE_MESSAGE(message, why(message));
  BOOST_TEST(std::get<HandlerCall>(*message).inputs[0].data.empty());
}

std::string header_named(std::string_view message) {
  if (message == "init") return header_of(HandlerInit{"m", "3", "b.pt2", "h \"q\".py", "", R"({"dims":[]})", 16});
  if (message == "request") {
    const HeaderLines lines = {{"content-type", "text/plain"}, {"x-weird", "\xc3\xa9\x01"}};
    return header_of(
        HandlerRequest{5, "POST", "/predictions/m", "a=1", lines, "127.0.0.1", "r1", "00-ab-cd-01", "user", 1500, 1});
  }
  if (message == "result") {
    const std::vector<Tensor> outputs = {{"y", Dtype::i64, {}, {}, {}}, {"z", Dtype::bf16, {}, {}, {}}};
    const std::vector<std::vector<std::int64_t>> shapes = {{2, 1}, {}};
    return header_of(CallResult{5, 2, "m", "3", outputs, shapes});
  }
  if (message == "failed") return failed_call(5, 2, 400, "input 'x': no");
  if (message == "cancel") return cancel_header(5);
  if (message == "more") return more_header(5);
  if (message == "ping") return ping_header(7);
  return drain_header();
}

BOOST_AUTO_TEST_CASE(messages_to_handlers_are_those_of_the_vectors) {
  const auto file = vectors("handlers/frames.json");
  for (const auto& entry : file.at("to_handler").as_array()) {
    BOOST_TEST(json::parse(header_named(text_of(entry.at("message")))) == entry.at("header"));
  }
}

}  // namespace
}  // namespace mctl
