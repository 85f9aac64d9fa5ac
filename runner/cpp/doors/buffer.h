// Bytes that grow in place where the kernel can move pages instead of copying them, and are not written beforehand.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <span>
#include <string_view>
#include <utility>

namespace mctl {

class Buffer {
 public:
  Buffer() = default;
  ~Buffer() { std::free(data_); }
  Buffer(Buffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), capacity_(std::exchange(other.capacity_, 0)) {}
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(capacity_, other.capacity_);
    return *this;
  }

  // Keeps what fits. False if there is no memory: then nothing has changed.
  [[nodiscard]] bool resize(std::size_t capacity) {
    if (capacity == capacity_) return true;
    if (capacity == 0) return *this = Buffer(), true;
    void* const moved = std::realloc(data_, capacity);
    if (moved == nullptr) return false;
    data_ = static_cast<char*>(moved);
    capacity_ = capacity;
    return true;
  }

  char* data() { return data_; }
  const char* data() const { return data_; }
  std::size_t size() const { return capacity_; }
  std::string_view text() const { return {data_, capacity_}; }
  std::span<const std::byte> bytes() const { return std::as_bytes(std::span(data_, capacity_)); }

 private:
  char* data_ = nullptr;
  std::size_t capacity_ = 0;
};

}  // namespace mctl
