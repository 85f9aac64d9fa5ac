// Takes requests out of what a client sends: one buffer, which grows as bytes come and never beforehand.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string_view>

#include "doors/buffer.h"
#include "doors/http.h"
#include "format/result.h"

namespace mctl {

class RequestReader {
 public:
  static constexpr std::size_t kFirst = 8 << 10;  // bytes of the buffer that every connection has

  RequestReader(std::size_t max_body, std::size_t max_header);

  // Where what comes next goes: may be empty, then make_room().
  std::span<char> space();
  void came(std::size_t count) { filled_ += count; }

  // `head` comes once, when the request's head is complete; `whole` when it all is. A refusal ends the connection.
  enum class Step { more, head, whole };
  Result<Step> parse();

  // The size that the buffer should have now. make_room() makes it so; false: there is no memory.
  std::size_t wanted() const;
  [[nodiscard]] bool make_room(std::size_t capacity);

  const Head& head() const { return parser_->request(); }
  std::string_view head_text() const { return {buffer_.data(), taken_ ? 0 : body_at_}; }
  bool head_done() const { return head_done_; }
  bool has_body() const { return parser_->chunked() || head().content_length.value_or(0) > 0; }
  std::span<const std::byte> body() const;
  // The buffer that the body lies in: once, when the request is whole, and body() is empty then.
  Buffer take_body();

  void next();     // forgets the request; what came after it stays
  void abandon();  // forgets all that came
  void shrink();   // between requests: gives back what the next one may not need
  bool empty() const { return filled_ == 0; }
  std::size_t ahead() const { return filled_ - parsed_; }  // bytes that are not parsed yet
  std::size_t capacity() const { return buffer_.size(); }

 private:
  const std::size_t max_body_, max_header_;
  std::optional<RequestParser> parser_;
  Buffer buffer_;  // [0, parsed_) is parsed, [parsed_, filled_) is not
  std::size_t parsed_ = 0, filled_ = 0, body_at_ = 0;
  bool head_done_ = false, taken_ = false;
};

}  // namespace mctl
