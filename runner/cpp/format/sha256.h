// SHA-256 (FIPS 180-4), with the CPU's own instructions where it has them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace mctl {

class Sha256 {
 public:
  enum class Path { best, portable };  // the tests run both

  explicit Sha256(Path path = Path::best);
  void update(std::span<const std::byte> bytes);
  std::string finish();  // 64 lower-case hex digits; the object is spent

 private:
  using Compress = void (*)(std::uint32_t* state, const std::byte* blocks, std::size_t count);
  std::array<std::uint32_t, 8> state_;
  std::array<std::byte, 64> tail_;
  std::uint64_t length_ = 0;  // bytes so far
  Compress compress_;
};

std::string sha256(std::span<const std::byte> bytes);

}  // namespace mctl
