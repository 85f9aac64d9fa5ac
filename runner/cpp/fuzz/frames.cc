// Bytes of a handler process: frames and messages are the same in whatever pieces they come, tensors lie within their
// body, and no room is made for more than is kept.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "check.h"
#include "pool/frame.h"
#include "pool/handler_messages.h"

namespace mctl {
namespace {

constexpr std::size_t kKept = 4096;

void look_at(const Frame& frame) {
  const auto body = frame.skipped ? std::nullopt : std::optional(frame.body);
  const auto message = parse_from_handler(frame.header, body);
  if (!message) return require(!message.error().text.empty(), "a refusal says why");
  if (const auto* call = std::get_if<HandlerCall>(&*message)) {
    std::size_t bytes = 0;
    for (const HandlerTensor& tensor : call->inputs) {
      bytes += tensor.data.size();
      const bool inside =
          tensor.data.empty() || (tensor.data.data() >= frame.body.data() &&
                                  tensor.data.data() + tensor.data.size() <= frame.body.data() + frame.body.size());
      require(inside, "a tensor lies within its frame's body");
    }
    require(bytes == frame.body.size(), "tensors share out the whole body");
  }
}

// What came of the bytes: each frame's header, body and said size, and at last the error.
std::vector<std::string> read(std::string_view bytes, std::size_t piece) {
  std::vector<std::string> seen;
  FrameReader reader(kKept);
  while (!bytes.empty()) {
    const auto room = reader.room();
    require(!room.empty(), "there is room for the next bytes");
    require(room.size() <= (1 << 20) + kKept + (128 << 10), "no room for more than is kept");
    const std::size_t count = std::min({piece, bytes.size(), room.size()});
    std::memcpy(room.data(), bytes.data(), count);
    reader.filled(count);
    bytes.remove_prefix(count);
    for (;;) {
      const auto frame = reader.next();
      if (!frame) {
        seen.push_back(frame.error().text);
        return seen;
      }
      if (!*frame) break;
      look_at(**frame);
      seen.push_back(std::string((*frame)->header) + '\0' + std::to_string((*frame)->body_size) +
                     std::string(reinterpret_cast<const char*>((*frame)->body.data()), (*frame)->body.size()));
    }
  }
  return seen;
}

}  // namespace
}  // namespace mctl

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  const auto whole = mctl::read(bytes, SIZE_MAX);
  mctl::require(mctl::read(bytes, 1) == whole, "the same byte by byte");
  mctl::require(mctl::read(bytes, 13) == whole, "the same in pieces");
  return 0;
}
