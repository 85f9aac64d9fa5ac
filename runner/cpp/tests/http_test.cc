// Requests byte by byte, answers' heads, compressed bodies, options.
#include "doors/http.h"

#include <boost/test/unit_test.hpp>

#include "doors/hosts.h"
#include "doors/inflate.h"
#include "doors/reader.h"
#include "doors/token.h"
#include "format/text.h"
#include "options.h"
#include "support.h"

namespace mctl {
namespace {

// Gives a reader `step` bytes at a time, the way that connection.cc does; how much of `text` is the request's.
Result<std::size_t> feed(RequestReader& reader, std::string_view text, std::size_t step) {
  for (std::size_t given = 0;;) {
    auto at = reader.parse();
    while (at && *at == RequestReader::Step::head) at = reader.parse();
    if (!at) return at.error();
    if (*at == RequestReader::Step::whole) return given - reader.ahead();
    if (given == text.size()) return Error{Code::internal, "unfinished"};
    if (reader.space().empty()) BOOST_REQUIRE(reader.make_room(reader.wanted()));
    const auto space = reader.space();
    const std::size_t count = std::min({step, space.size(), text.size() - given});
    std::copy_n(text.data() + given, count, space.data());
    reader.came(count);
    given += count;
  }
}

BOOST_AUTO_TEST_CASE(http_heads_in_pieces_of_any_size) {
  const std::string text =
      "POST http://host:1/v2/x?a=b HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
      "inference-header-content-length: 12\r\nX-Request-Id: q\r\nx-mctl-timeout-ms: 5\r\nExpect: 100-Continue\r\n"
      "Content-Length: 3\r\n\r\nabcGET /";
  for (const std::size_t step : {1, 2, 3, 7, 1000}) {
    RequestReader parser(100, 8192);
    const auto parsed = feed(parser, text, step);
    BOOST_REQUIRE_MESSAGE(parsed, why(parsed));
    BOOST_TEST(*parsed == text.size() - 5);
    const Head& head = parser.head();
    BOOST_TEST((head.verb == Verb::post));
    BOOST_TEST(head.target == "/v2/x?a=b");
    BOOST_TEST(head.content_type == "application/json");
    BOOST_TEST(*head.json_length == 12u);
    BOOST_TEST(*head.timeout_ms == 5u);
    BOOST_TEST(*head.content_length == 3u);
    BOOST_TEST(head.request_id == "q");
    BOOST_TEST(head.expects_continue);
    BOOST_TEST(head.keep_alive);
  }
}

BOOST_AUTO_TEST_CASE(http_chunks_in_pieces_of_any_size) {
  const std::string head = "POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n";
  const std::string text = head + "3;name=value\r\nabc\r\n1\r\nd\r\n0\r\nX-Trailer: 1\r\n\r\n",
                    empty = head + "0\r\n\r\n";
  for (std::size_t step = 1; step < 60; ++step) {
    RequestReader reader(4, 8192), nothing(0, 8192);
    BOOST_TEST(*feed(reader, text + text, step) == text.size());
    BOOST_TEST((std::ranges::equal(reader.body(), bytes_of("abcd"))));
    reader.next();
    BOOST_TEST(!reader.head_done());
    BOOST_TEST(*feed(nothing, empty, step) == empty.size());
    BOOST_TEST(nothing.body().empty());
  }
}

BOOST_AUTO_TEST_CASE(http_memory_is_taken_as_bytes_come) {
  const std::string head = "POST / HTTP/1.1\r\nHost: h\r\n", length = head + "Content-Length: 60000000\r\n\r\n";
  RequestReader reader(64 << 20, 8192);
  BOOST_TEST(!feed(reader, length, 1000));
  BOOST_TEST(reader.capacity() == RequestReader::kFirst);
  BOOST_TEST(!feed(reader, std::string(1 << 20, 'x'), 100'000));
  BOOST_TEST(reader.capacity() <= 2u << 20);
  reader.abandon();
  BOOST_TEST(reader.capacity() == RequestReader::kFirst);
  RequestReader chunks(64 << 20, 8192);  // and none stays with what stood between them
  std::string text = head + "Transfer-Encoding: chunked\r\n\r\n";
  for (int i = 0; i < 5000; ++i) text += "1\r\nx\r\n";
  BOOST_TEST(*feed(chunks, text + "0\r\n\r\n", 500) == text.size() + 5);
  BOOST_TEST(chunks.body().size() == 5000u);
  BOOST_TEST(chunks.capacity() == RequestReader::kFirst);
}

BOOST_AUTO_TEST_CASE(http_lines_beside_chunks_are_bounded_like_a_head) {
  const std::string head = "POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n";
  const std::string long_name(5000, 'x');
  std::string many, more;
  for (int i = 0; i < 500; ++i) many += "1;extension=1\r\nx\r\n", more += "Trailer: 1\r\n";
  for (const std::string& rest :
       {"1;" + long_name, "1;" + long_name + "\r\nx\r\n0\r\n\r\n", many + "0\r\n\r\n", "0\r\nX: " + long_name,
        "0\r\nX: " + long_name + "\r\n\r\n", "0\r\n" + more + "\r\n"}) {
    for (const std::size_t step : {1, 1000, 100'000}) {
      RequestReader reader(100'000, 4096);
      const auto read = feed(reader, head + rest, step);
      BOOST_TEST(why(read).ends_with("over the limit"), rest.substr(0, 20) << ": " << why(read));
      BOOST_TEST(reader.capacity() <= 4 * RequestReader::kFirst);
    }
  }
}

BOOST_AUTO_TEST_CASE(http_refusals) {
  const auto code = [](const std::string& text) {
    RequestReader reader(10, 4096);
    const auto parsed = feed(reader, text, 1000);
    BOOST_REQUIRE(!parsed);
    return status_of(parsed.error().code);
  };
  const std::string post = "POST / HTTP/1.1\r\nHost: h\r\n", old = "POST / HTTP/1.0\r\n",
                    body = "Content-Length: 1\r\n\r\nx";
  BOOST_TEST(code("POST / HTTP/1.1\r\n" + body) == 400u);
  BOOST_TEST(code(post + "Host: h\r\n" + body) == 400u);
  BOOST_TEST(code(old + "Host: h\r\nHost: h\r\n" + body) == 400u);
  BOOST_TEST(code("POST / HTTP/1.1\r\nHost: a, b\r\n" + body) == 400u);
  BOOST_TEST(code("POST / HTTP/1.1\r\nHost: u@b\r\n" + body) == 400u);
  BOOST_TEST(code(old + "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n") == 400u);
  BOOST_TEST(code(post + "Transfer-Encoding: chunked\r\n\r\n0\r\nX: 1\r\n 2\r\n\r\n") == 400u);
  BOOST_TEST(code("nonsense\r\n\r\n") == 400u);
  BOOST_TEST(code("GET / HTTP/2.0\r\n\r\n") == 400u);
  BOOST_TEST(code(post + "Content-Length: 1\r\nContent-Length: 2\r\n\r\n") == 400u);
  BOOST_TEST(code(post + "Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n") == 400u);
  BOOST_TEST(code(post + "Transfer-Encoding: chunked\r\nContent-Length: 1\r\n\r\n") == 400u);
  BOOST_TEST(code(post + "Content-Length: -1\r\n\r\n") == 400u);
  BOOST_TEST(code(post + "Content-Length: 99999999999999999999\r\n\r\n") == 400u);
  BOOST_TEST(code(post + "Transfer-Encoding: gzip\r\n\r\n") == 501u);
  BOOST_TEST(code(post + "Content-Length: 11\r\n\r\n") == 413u);
  BOOST_TEST(code(post + "Transfer-Encoding: chunked\r\n\r\nb\r\n") == 413u);
  BOOST_TEST(code(post + "Transfer-Encoding: chunked\r\n\r\nzz\r\n") == 400u);
  BOOST_TEST(code(post + "X: " + std::string(5000, 'x')) == 400u);
}

BOOST_AUTO_TEST_CASE(http_answers) {
  const Answer busy = refusal({Code::unavailable, "a \"quoted\" \x01 \xff reason"});
  BOOST_TEST(busy.body == R"({"error":"a \"quoted\" \u0001 \ufffd reason"})");
  std::string head;
  append_head(head, busy, busy.body.size(), "Thu, 01 Jan 1970 00:00:00 GMT", false, false);
  BOOST_TEST(head ==
             "HTTP/1.1 503 Service Unavailable\r\nServer: mctl\r\nDate: Thu, 01 Jan 1970 00:00:00 GMT\r\n"
             "Content-Type: application/json\r\nContent-Length: 45\r\nRetry-After: 1\r\nConnection: close\r\n\r\n");
  BOOST_TEST(refusal({Code::unauthorized, ""}).fields == "WWW-Authenticate: Bearer\r\n");
  std::string controls;  // of ASCII and of Latin-1, which steer terminals; what follows them is text
  append_json_string(controls, "\x1b \x7f \xc2\x80 \xc2\x9b \xc2\x9f \xc2\xa0 \xc3\x84");
  BOOST_TEST(controls == "\"\\u001b \\u007f \\u0080 \\u009b \\u009f \xc2\xa0 \xc3\x84\"");
  BOOST_TEST(http_date(784111777) == "Sun, 06 Nov 1994 08:49:37 GMT");  // RFC 9110, section 5.6.7
}

BOOST_AUTO_TEST_CASE(http_refusals_are_short) {
  BOOST_TEST(refusal({Code::invalid, std::string(1 << 20, '\1')}).body.size() < 32u << 10);
}

BOOST_AUTO_TEST_CASE(http_targets_and_hosts) {
  const auto head = [](const std::string& target) {
    RequestReader reader(0, 4096);
    BOOST_REQUIRE(feed(reader, "GET " + target + " HTTP/1.1\r\nHost: field:1\r\nOrigin: http://o\r\n\r\n", 1000));
    return reader.head();
  };
  BOOST_TEST(head("/a?b").host == "field:1");
  BOOST_TEST(head("/a?b").origin == "http://o");
  BOOST_TEST(head("http://other:2/a").host == "other:2");
  BOOST_TEST(head("http://other:2/a").target == "/a");
  BOOST_TEST(head("HTTP://other").target == "/");
  BOOST_TEST(head("http://other?a").target == "/?a");
  BOOST_TEST(head("http://other?a").host == "other");
  BOOST_TEST(name_of_host("Name.:80") == "Name");
  BOOST_TEST(name_of_host("[::1]:80") == "::1");
  BOOST_TEST(name_of_host("[::1]") == "::1");
  BOOST_TEST(name_of_host("") == "");
  const Hosts own = Hosts::of_loopback("127.0.0.5");
  for (const char* host : {"localhost", "LOCALHOST:8000", "localhost.:1", "127.0.0.1:80", "[::1]:80", "127.0.0.5"}) {
    BOOST_TEST(own.allow(host, ""), host);
    BOOST_TEST(own.allow(host, std::string("http://") + host), host);
    BOOST_TEST(!own.allow(host, "http://evil.example"), host);
    BOOST_TEST(!own.allow(host, "null"), host);
  }
  for (const char* host :
       {"evil.example", "localhost.evil.example", "evil.example:80", "[::2]", "127.0.0.1.evil.example"}) {
    BOOST_TEST(!own.allow(host, ""), host);
    BOOST_TEST(Hosts().allow(host, "http://evil.example"), host);
  }
  BOOST_TEST(Hosts::from_option("a.example,B.example:80").allow("b.example:9", "https://A.example"));
  BOOST_TEST(!Hosts::from_option("a.example,b.example").allow("c.example", ""));
  BOOST_TEST(Hosts::from_option("a.example,*").allow("c.example", ""));
}

BOOST_AUTO_TEST_CASE(tokens) {
  BOOST_TEST(bears("Bearer abc", "abc"));
  BOOST_TEST(bears("bearer  abc", "abc"));
  for (const char* other : {"", "abc", "Bearer", "Bearer ", "Bearer ab", "Bearer abcd", "Bearer abcabc", "Bearer abd",
                            "Bearer Abc", "Bearer abc ", "Basic abc", "Bearerabc"}) {
    BOOST_TEST(!bears(other, "abc"), other);
  }
}

std::string from_hex(std::string_view digits) {
  std::string bytes;
  for (std::size_t i = 0; i < digits.size(); i += 2) {
    bytes += static_cast<char>(std::stoi(std::string(digits.substr(i, 2)), nullptr, 16));
  }
  return bytes;
}

BOOST_AUTO_TEST_CASE(http_checksums_that_the_stream_is_read_into) {  // compressed by Python's zlib
  const std::string plain =
      R"({"inputs": [{"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [-1.6, 0.51, 0.836267]}]})";
  const std::string zlib = from_hex(
      "789cab56cacc2b282d2956b25288ae56ca4bcc4d05b2942a947414948a33120b40bc68431d05e358a0404a6249624925584cc92dc0d848"
      "092a0652a36ba867a6a360a0676a08222d8ccd8ccccc636b636b012e8219c5");
  const auto read = inflate("deflate", bytes_of(zlib), 1000);
  BOOST_REQUIRE(read);
  BOOST_TEST(read->text() == plain);
  for (std::size_t cut = 0; cut < zlib.size(); ++cut) {
    BOOST_TEST(!inflate("deflate", bytes_of(zlib).first(cut), 1000));
  }
  std::string wrong = zlib;
  wrong.back() ^= 1;
  BOOST_TEST(!inflate("deflate", bytes_of(wrong), 1000));
}

BOOST_AUTO_TEST_CASE(http_compressed_bodies) {  // compressed by Python's zlib
  const std::string plain = "mctl mctl mctl mctl mctl mctl mctl mctl ", deflate = from_hex("cb4d2ec951c8254c0000");
  const std::string zlib = from_hex("789ccb4d2ec951c8254c00002dff0e81");
  const std::string gzip = from_hex("1f8b0800000000000203cb4d2ec951c8254c00006f4bd4bb28000000");
  const auto inflated = [](std::string_view encoding, const std::string& data, std::size_t limit = 1000) {
    return inflate(encoding, bytes_of(data), limit);
  };
  BOOST_TEST(inflated("gzip", gzip)->text() == plain);
  BOOST_TEST(inflated("deflate", zlib)->text() == plain);
  BOOST_TEST(inflated("deflate", deflate)->text() == plain);
  BOOST_TEST(inflated("GZIP", gzip, plain.size())->text() == plain);
  BOOST_TEST(most_inflated("gzip", bytes_of(gzip), 1000) == plain.size());
  BOOST_TEST(most_inflated("deflate", bytes_of(zlib), 1000) == 1000u);
  BOOST_TEST((inflated("gzip", gzip, plain.size() - 1).error().code == Code::too_large));
  BOOST_TEST((inflated("br", gzip).error().code == Code::unsupported));
  for (std::size_t cut = 0; cut < gzip.size(); ++cut) BOOST_TEST(!inflated("gzip", gzip.substr(0, cut)));
  BOOST_TEST(!inflated("gzip", gzip + "x"));
  std::string wrong = gzip;
  wrong[wrong.size() - 5] ^= 1;  // of the checksum
  BOOST_TEST(!inflated("gzip", wrong));
}

BOOST_AUTO_TEST_CASE(options_all_forms) {
  const auto parse = [](std::vector<std::string> words) { return parse_serve_options(words); };
  const auto options = parse({"b.pt2", "--port=0", "--host", "::1", "--allowed-batch-sizes", "1,2,8", "--no-verify"});
  BOOST_REQUIRE(options);
  BOOST_TEST(options->bundles.at(0) == "b.pt2");
  BOOST_TEST(options->port == 0);
  BOOST_TEST(options->host == "::1");
  BOOST_TEST(options->allowed_batch_sizes->size() == 3u);
  BOOST_TEST(!options->verify);
  BOOST_TEST(why(parse({})) ==
             "nothing to serve: give bundles, a folder of models, `--config`, `--state` or `--admin-port`");
  BOOST_TEST(parse({"a", "b"})->bundles.size() == 2u);
  BOOST_TEST(why(parse({"a", "--port", "65536"})) == "`--port` is `65536`, allowed 0..65535");
  BOOST_TEST(why(parse({"a", "--port", "80x"})) == "`--port` is `80x`, allowed 0..65535");
  BOOST_TEST(why(parse({"a", "--port"})) == "`--port` needs a value: PORT");
  BOOST_TEST(why(parse({"a", "--nope"})) == "no such option: `--nope`");
  BOOST_TEST(why(parse({"a", "--null=1"})) == "`--null` takes no value");
  BOOST_TEST(why(parse({"a", "--allowed-batch-sizes=2,1"})) == "`--allowed-batch-sizes` is not ascending: 2,1");
}

}  // namespace
}  // namespace mctl
