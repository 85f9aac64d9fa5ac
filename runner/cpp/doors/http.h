// HTTP/1.1: what the server uses of a request's head, the parser that fills it, and the bytes of an answer.
#pragma once

#include <boost/beast/http/basic_parser.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "format/result.h"

namespace mctl {

enum class Verb : std::uint8_t { get, head, post, put, patch, remove, other };
constexpr std::size_t kVerbs = 7;

struct Head {
  Verb verb = Verb::other;
  std::string target;  // path and query, whatever form it came in
  std::string content_type, content_encoding, accept, authorization, request_id;
  std::string host, origin;  // the host is the target's, if that names one
  std::string key;           // x-mctl-key: requests with the same one go to the same version
  std::string if_match;      // ETags
  std::optional<std::uint64_t> content_length;
  std::optional<std::uint64_t> json_length;  // Inference-Header-Content-Length
  std::optional<std::uint64_t> timeout_ms;
  bool expects_continue = false, keep_alive = true, http_1_0 = false;
};

struct Answer {
  unsigned status = 200;
  std::string_view type = "application/json";  // empty: its line is among the fields
  std::string fields;                          // more header lines, each with its CRLF
  std::string body;
};

// {"error": text} with the status of the code.
Answer refusal(const Error& error);
unsigned status_of(Code code);

// The bytes of an answer's head. `length` is that of its body (nullopt: it comes in chunks, or until the end of the
// connection where HTTP has none), `date` the value of its Date line.
void append_head(std::string& out, const Answer& answer, std::optional<std::size_t> length, std::string_view date,
                 bool keep_alive, bool http_1_0);
std::string chunk_start(std::size_t size);  // its bytes and a line's end follow
bool has_no_body(unsigned status);
std::string http_date(std::int64_t seconds);

// Parses one request. A body stays where it is: of known length untouched, and of chunks joined.
class RequestParser final : public boost::beast::http::basic_parser<true> {
 public:
  RequestParser(std::uint64_t max_body, std::uint32_t max_header);

  // Takes what it can of `bytes` and returns how many that was; 0 bytes and no error: it needs more. Chunks are moved
  // to where the head ended, `body`, which is not after `bytes`.
  Result<std::size_t> take(std::string_view bytes, char* body);

  const Head& request() const { return head_; }
  std::size_t joined() const { return joined_; }  // bytes of the body so far, if it comes in chunks

 private:
  using Fault = boost::beast::error_code;
  using Text = boost::beast::string_view;
  void on_request_impl(boost::beast::http::verb verb, Text, Text target, int version, Fault&) override;
  void on_field_impl(boost::beast::http::field field, Text name, Text value, Fault&) override;
  void on_header_impl(Fault&) override;
  void on_body_init_impl(const boost::optional<std::uint64_t>&, Fault&) override {}
  std::size_t on_body_impl(Text body, Fault&) override { return body.size(); }
  void on_chunk_header_impl(std::uint64_t size, Text, Fault&) override;
  std::size_t on_chunk_body_impl(std::uint64_t, Text body, Fault&) override;
  void on_finish_impl(Fault&) override {}
  void on_response_impl(int, Text, int, Fault&) override {}

  void known_field(boost::beast::http::field field, std::string_view value);
  void other_field(std::string_view name, std::string_view value);
  void take_target(std::string_view target);
  void refuse(Code code, std::string text, Fault& ec);
  void count_aside(std::size_t bytes, Fault& ec);
  Status check_lines(std::string_view taken, std::string_view waits, bool in_head);

  const std::uint64_t max_body_;
  const std::size_t max_header_;
  Head head_;
  char* body_ = nullptr;
  std::size_t joined_ = 0;
  std::size_t head_size_ = 0, aside_ = 0;  // bytes of the head; of chunk extensions and trailers
  std::size_t hosts_ = 0;
  bool moved_ = false;  // bytes of a chunk, by the last take()
  std::optional<Error> error_;
};

}  // namespace mctl
