#include "doors/reader.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

namespace mctl {
namespace {

constexpr std::size_t kMostAtOnce = 256 << 10;  // bytes of one read, so that no client holds the loop for long
constexpr std::size_t kKept = 256 << 10;        // a larger buffer is given back after its request
constexpr std::size_t kSlack = 4 << 10;         // to see the next request, or the end, while one is served

}  // namespace

RequestReader::RequestReader(std::size_t max_body, std::size_t max_header)
    : max_body_(max_body), max_header_(max_header) {
  next();
}

std::span<char> RequestReader::space() {
  if (head_done_ && !taken_ && parser_->chunked()) {  // where chunks' lines stood
    const std::size_t end = body_at_ + parser_->joined();
    std::memmove(buffer_.data() + end, buffer_.data() + parsed_, ahead());
    filled_ -= parsed_ - end;
    parsed_ = end;
  }
  return {buffer_.data() + filled_, std::min(buffer_.size() - filled_, kMostAtOnce)};
}

Result<RequestReader::Step> RequestReader::parse() {
  while (parsed_ < filled_ && !parser_->is_done()) {
    const std::string_view bytes(buffer_.data() + parsed_, ahead());
    const auto taken = parser_->take(bytes, buffer_.data() + body_at_);
    if (!taken) return taken.error();
    parsed_ += *taken;
    if (!head_done_ && parser_->is_header_done()) {
      head_done_ = true;
      body_at_ = parsed_;
      return Step::head;
    }
    if (*taken == 0) return Step::more;
  }
  return head_done_ && parser_->is_done() ? Step::whole : Step::more;
}

std::size_t RequestReader::wanted() const {
  if (capacity() == 0) return kFirst;
  if (parser_->is_done()) return std::max(capacity(), filled_ + kSlack);
  if (filled_ < capacity()) return capacity();
  const auto length = head_done_ ? head().content_length : std::nullopt;
  const std::size_t most = length ? body_at_ + *length + kSlack : SIZE_MAX;
  return std::max(capacity() + kSlack, std::min(2 * capacity(), most));
}

bool RequestReader::make_room(std::size_t capacity) { return capacity <= buffer_.size() || buffer_.resize(capacity); }

std::span<const std::byte> RequestReader::body() const {
  if (taken_) return {};
  const std::size_t size = parser_->chunked() ? parser_->joined() : head().content_length.value_or(0);
  return std::as_bytes(std::span(buffer_.data() + body_at_, size));
}

Buffer RequestReader::take_body() {
  Buffer rest;
  if (!rest.resize(std::max(kFirst, ahead() + kSlack))) throw std::bad_alloc();
  std::memcpy(rest.data(), buffer_.data() + parsed_, ahead());
  filled_ = ahead();
  parsed_ = body_at_ = 0;
  taken_ = true;
  return std::exchange(buffer_, std::move(rest));
}

void RequestReader::next() {
  if (parsed_ > 0) std::memmove(buffer_.data(), buffer_.data() + parsed_, ahead());
  filled_ -= parsed_;
  parsed_ = body_at_ = 0;
  head_done_ = taken_ = false;
  parser_.emplace(max_body_, static_cast<std::uint32_t>(max_header_));
  if (capacity() > kKept) shrink();
}

void RequestReader::abandon() {
  parsed_ = filled_;
  next();
  shrink();
}

// Less than it needs is never left; that less cannot be had is no harm.
void RequestReader::shrink() { static_cast<void>(capacity() > kFirst && buffer_.resize(std::max(kFirst, filled_))); }

}  // namespace mctl
