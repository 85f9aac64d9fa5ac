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

enum class Verb : std::uint8_t { get, head, post, other };

struct Head {
  Verb verb = Verb::other;
  std::string target;  // path and query, whatever form it came in
  std::string content_type, content_encoding, accept, authorization, request_id;
  std::optional<std::uint64_t> content_length;
  std::optional<std::uint64_t> json_length;  // Inference-Header-Content-Length
  std::optional<std::uint64_t> timeout_ms;
  bool expects_continue = false, keep_alive = true, http_1_0 = false;
};

struct Answer {
  unsigned status = 200;
  std::string_view type = "application/json";
  std::string fields;  // more header lines, each with its CRLF
  std::string body;
};

// {"error": text} with the status of the code.
Answer refusal(const Error& error);
unsigned status_of(Code code);

// The bytes of an answer's head. `date` is the value of its Date line.
void append_head(std::string& out, const Answer& answer, std::string_view date, bool keep_alive, bool http_1_0);
std::string http_date(std::int64_t seconds);

// Parses one request; bytes of a body of known length are left where they are.
class RequestParser final : public boost::beast::http::basic_parser<true> {
 public:
  RequestParser(std::uint64_t max_body, std::uint32_t max_header);

  // Takes what it can of `bytes` and returns how many that was; 0 bytes and no error: it needs more.
  Result<std::size_t> take(std::string_view bytes);

  const Head& request() const { return head_; }
  const std::string& chunks() const { return chunks_; }  // the body, if it came in chunks
  std::string take_chunks() { return std::exchange(chunks_, {}); }

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
  void refuse(Code code, std::string text, Fault& ec);

  const std::uint64_t max_body_;
  Head head_;
  std::string chunks_;
  std::optional<Error> error_;
};

}  // namespace mctl
