#include "doors/http.h"

#include <algorithm>
#include <boost/beast/core/string.hpp>
#include <boost/beast/http/error.hpp>
#include <cctype>
#include <charconv>
#include <cstring>
#include <ctime>

#include "format/text.h"

namespace mctl {
namespace {

namespace http = boost::beast::http;
using boost::beast::iequals;

constexpr std::size_t kMaxId = 128;         // characters of a request id that is echoed
constexpr std::size_t kMostSaid = 4 << 10;  // bytes of an error, which may name what the client sent

struct StatusLine {
  Code code;
  unsigned number;
  std::string_view reason;
};

constexpr StatusLine kStatuses[] = {
    {Code::invalid, 400, "Bad Request"},
    {Code::unauthorized, 401, "Unauthorized"},
    {Code::forbidden, 403, "Forbidden"},
    {Code::not_found, 404, "Not Found"},
    {Code::method, 405, "Method Not Allowed"},
    {Code::too_slow, 408, "Request Timeout"},
    {Code::conflict, 409, "Conflict"},
    {Code::outdated, 412, "Precondition Failed"},
    {Code::too_large, 413, "Content Too Large"},
    {Code::unsupported, 415, "Unsupported Media Type"},
    {Code::unsayable, 422, "Unprocessable Content"},
    {Code::unimplemented, 501, "Not Implemented"},
    {Code::unavailable, 503, "Service Unavailable"},
    {Code::deadline, 504, "Gateway Timeout"},
};

std::string_view reason_of(unsigned number) {
  const auto* found = std::ranges::find(kStatuses, number, &StatusLine::number);
  if (found != std::end(kStatuses)) return found->reason;
  if (number == 500) return "Internal Server Error";
  return number == 200 ? "OK" : number == 202 ? "Accepted" : "";  // a handler's own: clients go by the number
}

std::optional<std::uint64_t> decimal(std::string_view text) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return value;
}

bool is_visible_ascii(std::string_view text) {
  for (const char c : text) {
    if (c < 0x20 || c > 0x7e) return false;
  }
  return true;
}

// What RFC 3986 allows in a host and its port; user names are not for servers (RFC 9110, section 4.2.4).
bool is_host(std::string_view text) {
  return std::ranges::all_of(text, [](unsigned char c) {
    return std::isalnum(c) != 0 ||
           std::string_view("-._~%!$&'()*+,;=:[]").find(static_cast<char>(c)) != std::string_view::npos;
  });
}

// Allowed once, and read in different ways: what one server takes for a field is a value to another (RFC 9112, 5.2).
bool is_folded(std::string_view lines) {
  return lines.find("\r\n ") != lines.npos || lines.find("\r\n\t") != lines.npos;
}

Verb verb_from(http::verb verb) {
  switch (verb) {
    case http::verb::get:
      return Verb::get;
    case http::verb::head:
      return Verb::head;
    case http::verb::post:
      return Verb::post;
    case http::verb::put:
      return Verb::put;
    case http::verb::patch:
      return Verb::patch;
    case http::verb::delete_:
      return Verb::remove;
    default:
      return Verb::other;
  }
}

std::string sentence_of(const boost::beast::error_code& ec) {
  if (ec == http::error::multiple_content_length) return "two Content-Length fields that differ";
  if (ec == http::error::bad_content_length) return "bad Content-Length, or one beside Transfer-Encoding";
  if (ec == http::error::bad_transfer_encoding) return "bad Transfer-Encoding, or one beside Content-Length";
  return "malformed HTTP request: " + ec.message();
}

}  // namespace

unsigned status_of(Code code) {
  const auto* found = std::ranges::find(kStatuses, code, &StatusLine::code);
  return found == std::end(kStatuses) ? 500 : found->number;
}

Answer refusal(const Error& error) {
  Answer answer;
  answer.status = status_of(error.code);
  if (answer.status == 503) answer.fields = "Retry-After: " + std::to_string(error.retry_after_s) + "\r\n";
  if (answer.status == 401) answer.fields = "WWW-Authenticate: Bearer\r\n";
  answer.body = "{\"error\":";
  append_json_string(answer.body, std::string_view(error.text).substr(0, kMostSaid));
  answer.body += '}';
  return answer;
}

bool has_no_body(unsigned status) { return status == 204 || status == 304; }

std::string chunk_start(std::size_t size) {
  char digits[16];
  return std::string(digits, std::to_chars(digits, digits + sizeof digits, size, 16).ptr) + "\r\n";
}

void append_head(std::string& out, const Answer& answer, std::optional<std::size_t> length, std::string_view date,
                 bool keep_alive, bool http_1_0) {
  char digits[24];
  const auto number = [&](std::uint64_t value) {
    return std::string_view(digits, std::to_chars(digits, digits + sizeof digits, value).ptr - digits);
  };
  out += "HTTP/1.1 ";
  out += number(answer.status);
  out += ' ';
  out += reason_of(answer.status);
  out += "\r\nServer: mctl\r\nDate: ";
  out += date;
  out += "\r\n";
  if (!answer.type.empty()) ((out += "Content-Type: ") += answer.type) += "\r\n";
  if (length && !has_no_body(answer.status)) ((out += "Content-Length: ") += number(*length)) += "\r\n";
  if (!length && !http_1_0) out += "Transfer-Encoding: chunked\r\n";
  out += answer.fields;
  if (!keep_alive) out += "Connection: close\r\n";
  if (keep_alive && http_1_0) out += "Connection: keep-alive\r\n";
  out += "\r\n";
}

std::string http_date(std::int64_t seconds) {
  const std::time_t time = seconds;
  std::tm parts{};
  gmtime_r(&time, &parts);
  char text[40];
  return {text, std::strftime(text, sizeof text, "%a, %d %b %Y %H:%M:%S GMT", &parts)};
}

RequestParser::RequestParser(std::uint64_t max_body, std::uint32_t max_header)
    : max_body_(max_body), max_header_(max_header) {
  body_limit(max_body);
  header_limit(max_header);
}

Result<std::size_t> RequestParser::take(std::string_view bytes, char* body) {
  const bool in_head = !is_header_done();
  body_ = body;
  moved_ = false;
  boost::beast::error_code ec;
  const std::size_t taken = put(boost::asio::buffer(bytes), ec);
  if (error_) return *error_;
  if (ec == http::error::body_limit) return Error{Code::too_large, "the body is over the limit"};
  if (ec == http::error::header_limit) return Error{Code::invalid, "the head is over the limit"};
  if (ec && ec != http::error::need_more) return Error{Code::invalid, sentence_of(ec)};
  const std::string_view waits = ec ? bytes.substr(taken) : std::string_view();
  if (auto sound = check_lines(bytes.substr(0, taken), waits, in_head); !sound) return sound.error();
  return taken;
}

// The lines of a head, and those around chunks: `waits` is one that has not come whole.
Status RequestParser::check_lines(std::string_view taken, std::string_view waits, bool in_head) {
  if (!in_head && (!chunked() || moved_)) return Done{};
  if (is_folded(taken)) return Error{Code::invalid, "a header line is folded"};
  if (in_head) head_size_ += taken.size();
  const std::size_t size = waits.size() + (in_head ? head_size_ : taken.size());
  if (size <= max_header_) return Done{};
  return Error{Code::invalid,
               in_head ? "the head is over the limit" : "what stands beside the chunks is over the limit"};
}

void RequestParser::on_request_impl(http::verb verb, Text, Text target, int version, Fault& ec) {
  head_.verb = verb_from(verb);
  take_target(target);
  head_.http_1_0 = version == 10;
  if (!is_host(head_.host)) refuse(Code::invalid, "the target names no host", ec);
}

// An absolute form names the host too, in the place of the Host field (RFC 9112, section 3.2.2).
void RequestParser::take_target(std::string_view target) {
  for (const std::string_view scheme : {"http://", "https://"}) {
    if (target.size() <= scheme.size() || !iequals(target.substr(0, scheme.size()), scheme)) continue;
    target.remove_prefix(scheme.size());
    const std::size_t end = std::min(target.find_first_of("/?#"), target.size());
    head_.host = target.substr(0, end);
    target.remove_prefix(end);
    if (!target.starts_with('/')) head_.target = "/";
  }
  head_.target += target;
}

void RequestParser::on_field_impl(http::field field, Text name, Text value, Fault& ec) {
  if (is_header_done()) return count_aside(name.size() + value.size(), ec);  // a trailer
  if (field == http::field::unknown) return other_field(name, value);
  if (field == http::field::transfer_encoding && !iequals(value, "chunked")) {
    return refuse(Code::unimplemented, "only Transfer-Encoding: chunked is implemented", ec);
  }
  if (field == http::field::host) {
    if (++hosts_ > 1) return refuse(Code::invalid, "two Host fields", ec);
    if (!is_host(value)) return refuse(Code::invalid, "the Host field names no host", ec);
    if (head_.host.empty()) head_.host = value;
  }
  known_field(field, value);
}

void RequestParser::known_field(http::field field, std::string_view value) {
  switch (field) {
    case http::field::content_type:
      head_.content_type = value;
      break;
    case http::field::content_encoding:
      head_.content_encoding = value;
      break;
    case http::field::accept:
      head_.accept = value;
      break;
    case http::field::authorization:
      head_.authorization = value;
      break;
    case http::field::origin:
      head_.origin = value;
      break;
    case http::field::if_match:
      head_.if_match = value;
      break;
    case http::field::expect:
      head_.expects_continue = iequals(value, "100-continue");
      break;
    default:
      break;
  }
}

void RequestParser::other_field(std::string_view name, std::string_view value) {
  constexpr std::uint64_t never = ~0ULL;  // what is no number is refused later, by its range
  if (iequals(name, "Inference-Header-Content-Length")) {
    head_.json_length = decimal(value).value_or(never);
  } else if (iequals(name, "x-mctl-timeout-ms")) {
    head_.timeout_ms = decimal(value).value_or(never);
  } else if (iequals(name, "x-request-id") && value.size() <= kMaxId && is_visible_ascii(value)) {
    head_.request_id = value;
  } else if (iequals(name, "x-mctl-key")) {
    head_.key = value;
  }
}

// RFC 9112: an HTTP/1.1 request has one Host field (section 3.2), chunks came with HTTP/1.1 (section 6.1).
void RequestParser::on_header_impl(Fault& ec) {
  head_.keep_alive = keep_alive();
  if (const auto length = content_length()) head_.content_length = *length;
  if (hosts_ == 0 && !head_.http_1_0) refuse(Code::invalid, "there is no Host field", ec);
  if (chunked() && head_.http_1_0) refuse(Code::invalid, "HTTP/1.0 has no Transfer-Encoding", ec);
  if (chunked()) body_limit(boost::none);  // Beast takes a chunk's size off it anew whenever its line comes in pieces
}

void RequestParser::on_chunk_header_impl(std::uint64_t size, Text extensions, Fault& ec) {
  if (size > max_body_ - joined_) return refuse(Code::too_large, "the body is over the limit", ec);
  count_aside(extensions.size(), ec);
}

std::size_t RequestParser::on_chunk_body_impl(std::uint64_t, Text chunk, Fault&) {
  std::memmove(body_ + joined_, chunk.data(), chunk.size());
  joined_ += chunk.size();
  moved_ = true;
  return chunk.size();
}

void RequestParser::count_aside(std::size_t bytes, Fault& ec) {
  aside_ += bytes;
  if (aside_ > max_header_) refuse(Code::invalid, "chunk extensions and trailers are over the limit", ec);
}

void RequestParser::refuse(Code code, std::string text, Fault& ec) {
  error_ = Error{code, std::move(text)};
  ec = boost::system::errc::make_error_code(boost::system::errc::invalid_argument);
}

}  // namespace mctl
