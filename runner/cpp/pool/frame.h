// Frames between the front and a handler process: the lengths of header and body (4 and 8 bytes, little-endian), a JSON
// object, and raw bytes. ARCHITECTURE.md has the protocol; pool/handler_messages.h what the headers say.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "format/result.h"

namespace mctl {

constexpr std::size_t kFrameStart = 12;          // bytes of the two lengths
constexpr std::size_t kMostHeader = 1 << 20;     // bytes
constexpr std::uint64_t kMostBody = 1ULL << 30;  // bytes

// A frame's first bytes; those of the body are to follow.
std::string frame_start(std::string_view header, std::uint64_t body_size);

struct Frame {
  std::string_view header;
  std::span<const std::byte> body;
  std::uint64_t body_size = 0;  // that it came with
  bool skipped = false;         // the body was larger than is kept, and is left out
};

// Frames from the bytes of a stream, in whatever pieces they come. Nothing is allocated for more than it keeps.
class FrameReader {
 public:
  explicit FrameReader(std::size_t kept_body) : kept_body_(kept_body) {}

  // Where the next bytes are to be put, and how many were.
  std::span<std::byte> room();
  void filled(std::size_t count) { end_ += count; }

  // The next frame, whose bytes stay until room() is asked for; nullopt: it is not complete. Code::invalid: the other
  // side does not keep to the protocol, and nothing more can be read.
  Result<std::optional<Frame>> next();

 private:
  std::span<const std::byte> unread() const { return {buffer_.get() + begin_, end_ - begin_}; }
  void reserve(std::size_t bytes);
  std::optional<Frame> skip();

  const std::size_t kept_body_;
  std::unique_ptr<std::byte[]> buffer_;
  std::size_t capacity_ = 0, begin_ = 0, end_ = 0;
  std::size_t wanted_ = 0;      // bytes of the frame in hand
  std::string skipped_header_;  // of the frame whose body is being left out
  std::uint64_t skipped_size_ = 0, left_to_skip_ = 0;
  bool skipping_ = false;
};

}  // namespace mctl
