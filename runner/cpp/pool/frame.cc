#include "pool/frame.h"

#include <algorithm>
#include <cstring>

namespace mctl {
namespace {

constexpr std::size_t kFirstBuffer = 64 << 10;
constexpr std::size_t kKeptBuffer = 1 << 20;  // a larger one is given back once it is empty

std::uint64_t number_at(std::span<const std::byte> bytes, std::size_t at, std::size_t size) {
  std::uint64_t value = 0;
  for (std::size_t i = size; i-- > 0;) value = value << 8 | std::to_integer<std::uint64_t>(bytes[at + i]);
  return value;
}

void append_number(std::string& out, std::uint64_t value, std::size_t size) {
  for (std::size_t i = 0; i < size; ++i) out += static_cast<char>(value >> 8 * i & 0xff);
}

std::string_view text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace

std::string frame_start(std::string_view header, std::uint64_t body_size) {
  std::string out;
  out.reserve(kFrameStart + header.size());
  append_number(out, header.size(), 4);
  append_number(out, body_size, 8);
  return out += header;
}

std::span<std::byte> FrameReader::room() {
  if (begin_ == end_) {
    begin_ = end_ = 0;
    if (capacity_ > kKeptBuffer && wanted_ <= kKeptBuffer) capacity_ = 0;
  }
  reserve(std::max(wanted_, kFirstBuffer));
  return {buffer_.get() + end_, capacity_ - end_};
}

// Room for so many bytes from begin_ on, and for one more than there are.
void FrameReader::reserve(std::size_t bytes) {
  const std::size_t held = end_ - begin_;
  bytes = std::max(bytes, held + 1);
  if (begin_ + bytes <= capacity_) return;
  if (bytes <= capacity_) {
    std::memmove(buffer_.get(), buffer_.get() + begin_, held);
  } else {
    auto larger = std::make_unique_for_overwrite<std::byte[]>(bytes);
    if (held > 0) std::memcpy(larger.get(), buffer_.get() + begin_, held);
    buffer_ = std::move(larger);
    capacity_ = bytes;
  }
  begin_ = 0;
  end_ = held;
}

std::optional<Frame> FrameReader::skip() {
  const std::uint64_t count = std::min<std::uint64_t>(left_to_skip_, end_ - begin_);
  begin_ += count;
  left_to_skip_ -= count;
  if (left_to_skip_ > 0) return std::nullopt;
  skipping_ = false;
  return Frame{skipped_header_, {}, skipped_size_, true};
}

Result<std::optional<Frame>> FrameReader::next() {
  wanted_ = 0;
  if (skipping_) return skip();
  const auto bytes = unread();
  if (bytes.size() < kFrameStart) return std::optional<Frame>();
  const std::uint64_t header = number_at(bytes, 0, 4), body = number_at(bytes, 4, 8);
  if (header > kMostHeader) return Error{Code::invalid, "a frame's header has " + std::to_string(header) + " bytes"};
  if (body > kMostBody) return Error{Code::invalid, "a frame's body has " + std::to_string(body) + " bytes"};
  const std::size_t start = kFrameStart + header;
  const bool kept = body <= kept_body_;
  const std::size_t whole = start + (kept ? body : 0);
  if (bytes.size() < whole) {
    wanted_ = whole;
    return std::optional<Frame>();
  }
  begin_ += whole;
  const std::string_view text = text_of(bytes.subspan(kFrameStart, header));
  if (kept) return std::optional(Frame{text, bytes.subspan(start, body), body, false});
  skipped_header_ = text;
  skipped_size_ = left_to_skip_ = body;
  skipping_ = true;
  return skip();
}

}  // namespace mctl
