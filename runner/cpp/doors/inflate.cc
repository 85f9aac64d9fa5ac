#include "doors/inflate.h"

#include <algorithm>
#include <array>
#include <boost/beast/core/string.hpp>
#include <boost/beast/zlib/inflate_stream.hpp>
#include <cstdint>

namespace mctl {
namespace {

namespace zlib = boost::beast::zlib;

using Bytes = std::span<const std::byte>;

Error malformed() { return {Code::invalid, "the compressed body is damaged"}; }

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

// A raw deflate stream at the front of `data`, which moves past it, and maybe further: Beast looks ahead, and may count
// bytes of what follows as read.
Result<std::string> inflate_raw(Bytes& data, std::size_t limit) {
  constexpr std::size_t first = 64 << 10;
  std::string out;
  zlib::inflate_stream stream;
  zlib::z_params state{};
  state.next_in = data.data();
  state.avail_in = data.size();
  for (;;) {
    const std::size_t had = out.size();
    if (had > limit) return Error{Code::too_large, "the inflated body is over the limit"};
    out.resize(std::min(limit + 1, std::max(first, 2 * had)));
    state.next_out = out.data() + had;
    state.avail_out = out.size() - had;
    boost::beast::error_code ec;
    stream.write(state, zlib::Flush::sync, ec);
    out.resize(out.size() - state.avail_out);
    if (ec == zlib::error::end_of_stream) break;
    const bool progress = out.size() > had || !ec;
    if ((ec && ec != zlib::error::need_buffers) || !progress || (state.avail_in == 0 && state.avail_out > 0)) {
      return malformed();
    }
  }
  if (out.size() > limit) return Error{Code::too_large, "the inflated body is over the limit"};
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

Result<std::string> inflate_gzip(Bytes data, std::size_t limit) {
  if (!skip_gzip_header(data) || data.size() < 8) return malformed();
  const Bytes trailer = data.last(8);
  auto out = inflate_raw(data, limit);
  if (!out) return out;
  const bool sound = data.size() <= 8 && little(trailer, 0) == crc32(*out) &&
                     little(trailer, 4) == static_cast<std::uint32_t>(out->size());
  return sound ? out : Result<std::string>(malformed());
}

Result<std::string> inflate_zlib(Bytes data, std::size_t limit) {
  const bool framed = data.size() >= 2 && (byte(data, 0) & 15) == 8 && (byte(data, 0) << 8 | byte(data, 1)) % 31 == 0;
  if (framed) data = data.subspan(2);
  if (framed && data.size() < 4) return malformed();
  const Bytes trailer = framed ? data.last(4) : Bytes();
  auto out = inflate_raw(data, limit);
  if (!out) return out;
  const bool sound = data.size() <= trailer.size() && (!framed || big(trailer, 0) == adler32(*out));
  return sound ? out : Result<std::string>(malformed());
}

}  // namespace

Result<std::string> inflate(std::string_view encoding, Bytes data, std::size_t limit) {
  using boost::beast::iequals;
  if (iequals(encoding, "gzip") || iequals(encoding, "x-gzip")) return inflate_gzip(data, limit);
  if (iequals(encoding, "deflate")) return inflate_zlib(data, limit);
  return Error{Code::unsupported, "Content-Encoding '" + std::string(encoding) + "' is not understood: gzip, deflate"};
}

}  // namespace mctl
