#include "doors/inflate.h"

#include <algorithm>
#include <array>
#include <boost/beast/core/string.hpp>
#include <boost/beast/zlib/inflate_stream.hpp>
#include <cstdint>
#include <new>

namespace mctl {
namespace {

namespace zlib = boost::beast::zlib;

using Bytes = std::span<const std::byte>;

constexpr std::size_t kAnyRatio = 1 << 20, kMostRatio = 100;  // over so many bytes, so many times the compressed size

Error malformed() { return {Code::invalid, "the compressed body is damaged"}; }
Error too_large() { return {Code::too_large, "the inflated body is over the limit"}; }

constexpr std::array<std::uint32_t, 256> crc_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t i = 0; i < table.size(); ++i) {
    std::uint32_t value = i;
    for (int bit = 0; bit < 8; ++bit) value = value & 1 ? 0xedb88320u ^ (value >> 1) : value >> 1;
    table[i] = value;
  }
  return table;
}

std::uint32_t crc32(std::string_view data) {
  static constexpr auto table = crc_table();
  std::uint32_t value = ~0u;
  for (const char c : data) value = table[(value ^ static_cast<unsigned char>(c)) & 255] ^ (value >> 8);
  return ~value;
}

std::uint32_t adler32(std::string_view data) {
  constexpr std::uint32_t prime = 65521;
  std::uint32_t a = 1, b = 0;
  for (const char c : data) {
    a = (a + static_cast<unsigned char>(c)) % prime;
    b = (b + a) % prime;
  }
  return b << 16 | a;
}

std::uint32_t byte(Bytes data, std::size_t at) { return std::to_integer<std::uint32_t>(data[at]); }
std::uint32_t little(Bytes data, std::size_t at) {
  return byte(data, at) | byte(data, at + 1) << 8 | byte(data, at + 2) << 16 | byte(data, at + 3) << 24;
}
std::uint32_t big(Bytes data, std::size_t at) { return __builtin_bswap32(little(data, at)); }

// A raw deflate stream of at most `limit` bytes at the front of `data`, which moves past it, and maybe further: Beast
// looks ahead, and may count bytes of what follows as read.
Result<Buffer> inflate_raw(Bytes& data, std::size_t limit) {
  constexpr std::size_t first = 64 << 10;
  Buffer out;
  std::size_t filled = 0;
  zlib::inflate_stream stream;
  zlib::z_params state{};
  state.next_in = data.data();
  state.avail_in = data.size();
  for (;;) {
    const std::size_t had = filled;
    if (had > limit) return too_large();
    if (!out.resize(std::min(limit + 1, std::max(first, 2 * had)))) throw std::bad_alloc();
    state.next_out = out.data() + had;
    state.avail_out = out.size() - had;
    boost::beast::error_code ec;
    stream.write(state, zlib::Flush::sync, ec);
    filled = out.size() - state.avail_out;
    if (ec == zlib::error::end_of_stream) break;
    const bool progress = filled > had || !ec;
    if ((ec && ec != zlib::error::need_buffers) || !progress || (state.avail_in == 0 && state.avail_out > 0)) {
      return malformed();
    }
  }
  if (filled > limit) return too_large();
  if (!out.resize(filled)) throw std::bad_alloc();
  data = data.last(state.avail_in);
  return out;
}

// Past a field that ends with a zero byte; false if it does not end.
bool skip_text(Bytes& data) {
  const auto end = std::find(data.begin(), data.end(), std::byte{0});
  if (end == data.end()) return false;
  data = data.subspan(end - data.begin() + 1);
  return true;
}

// RFC 1952, section 2.3.
bool skip_gzip_header(Bytes& data) {
  if (data.size() < 10 || byte(data, 0) != 0x1f || byte(data, 1) != 0x8b || byte(data, 2) != 8) return false;
  const std::uint32_t flags = byte(data, 3);
  data = data.subspan(10);
  if (flags & 4) {
    if (data.size() < 2) return false;
    const std::size_t extra = 2 + (byte(data, 0) | byte(data, 1) << 8);
    if (data.size() < extra) return false;
    data = data.subspan(extra);
  }
  if ((flags & 8) && !skip_text(data)) return false;
  if ((flags & 16) && !skip_text(data)) return false;
  if (flags & 2) {
    if (data.size() < 2) return false;
    data = data.subspan(2);
  }
  return true;
}

// It ends with the size of what is in it (RFC 1952, section 2.3.1).
std::size_t stated_size(Bytes data) { return data.size() < 18 ? 0 : little(data, data.size() - 4); }

Result<Buffer> inflate_gzip(Bytes data, std::size_t limit) {
  const std::size_t size = stated_size(data);
  if (!skip_gzip_header(data) || data.size() < 8) return malformed();
  const Bytes trailer = data.last(8);
  auto out = inflate_raw(data, std::min(size, limit));
  if (!out) return out.error().code == Code::too_large && size <= limit ? malformed() : out.error();
  const bool sound = data.size() <= 8 && little(trailer, 0) == crc32(out->text()) && out->size() == size;
  return sound ? std::move(out) : Result<Buffer>(malformed());
}

Result<Buffer> inflate_zlib(Bytes data, std::size_t limit) {
  const bool framed = data.size() >= 2 && (byte(data, 0) & 15) == 8 && (byte(data, 0) << 8 | byte(data, 1)) % 31 == 0;
  if (framed) data = data.subspan(2);
  if (framed && data.size() < 4) return malformed();
  const Bytes trailer = framed ? data.last(4) : Bytes();
  auto out = inflate_raw(data, limit);
  if (!out) return out;
  const bool sound = data.size() <= trailer.size() && (!framed || big(trailer, 0) == adler32(out->text()));
  return sound ? std::move(out) : Result<Buffer>(malformed());
}

bool is_gzip(std::string_view encoding) {
  return boost::beast::iequals(encoding, "gzip") || boost::beast::iequals(encoding, "x-gzip");
}

}  // namespace

std::size_t most_inflated(std::string_view encoding, Bytes data, std::size_t limit) {
  const std::size_t most = std::min(limit, std::max(kAnyRatio, kMostRatio * data.size()));
  return is_gzip(encoding) ? std::min(most, stated_size(data)) : most;
}

Result<Buffer> inflate(std::string_view encoding, Bytes data, std::size_t limit) {
  const std::size_t ratio = std::max(kAnyRatio, kMostRatio * data.size());
  if (is_gzip(encoding)) return inflate_gzip(data, std::min(limit, ratio));
  if (boost::beast::iequals(encoding, "deflate")) return inflate_zlib(data, std::min(limit, ratio));
  return Error{Code::unsupported, "Content-Encoding '" + std::string(encoding) + "' is not understood: gzip, deflate"};
}

}  // namespace mctl
