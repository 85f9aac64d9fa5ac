// What operators have in common: memory for a while, threads, axes, and names for what is refused.
#pragma once

#include <omp.h>

#include <algorithm>

#include "tensor.h"

namespace mctl::shim {

// Memory for as long as this lives; nothing behind it where there is none.
class Scratch {
 public:
  // `count` times `bytes`.
  Scratch(std::int64_t count, std::int64_t bytes) {
    std::int64_t whole = 0;
    if (count >= 0 && bytes >= 0 && !__builtin_mul_overflow(count, bytes, &whole))
      block_ = allocate(static_cast<std::size_t>(whole));
    if (block_ == nullptr) fail("there is no memory for %lld times %lld bytes", as_long(count), as_long(bytes));
  }
  ~Scratch() {
    if (block_ != nullptr) release(block_);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  explicit operator bool() const { return block_ != nullptr; }

  template <class T>
  T* at(std::int64_t index = 0) const {
    return reinterpret_cast<T*>(block_->data()) + index;
  }

 private:
  static long long as_long(std::int64_t number) { return number; }

  Block* block_ = nullptr;
};

// A loop is worth another thread for each so many steps: some 20 us of one core, where a step is one of the products
// and sums that a vector makes at once.
constexpr std::int64_t kStepsOfThread = 1 << 20;

inline int threads_for(double steps) {
  return static_cast<int>(std::clamp(steps / kStepsOfThread, 1.0, static_cast<double>(omp_get_max_threads())));
}

// Calls work(i, thread) for each i below `count`, on so many threads; one alone needs nothing of OpenMP. The team is
// always that of all threads: g++'s OpenMP ends those that a smaller team has no place for, and starts others later.
template <class Work>
void share_out(int threads, std::int64_t count, const Work& work) {
  if (threads <= 1) {
    for (std::int64_t i = 0; i < count; ++i) work(i, 0);
    return;
  }
#pragma omp parallel
  {
    const int team = std::min(threads, omp_get_num_threads()), thread = omp_get_thread_num();
    if (thread < team)
      for (std::int64_t i = count * thread / team, end = count * (thread + 1) / team; i < end; ++i) work(i, thread);
  }
}

// "float32" for 6.
const char* name_of(std::int32_t dtype);

// The axis counted from the front; a tensor without axes has one of size 1. Fails where there is no such axis.
AOTITorchError find_axis(const Tensor& tensor, std::int64_t axis, std::int32_t* result);

AOTITorchError same_dtype(const char* name, const Tensor& one, const Tensor& other);

AOTITorchError refuse_dtype(const char* name, std::int32_t dtype);

// A new tensor, row-major.
AOTITorchError make_rows(std::int64_t rank, const std::int64_t* sizes, std::int32_t dtype, Handle* result);

// Do the channels (axis 1) of images lie side by side, as torch tells it by the strides?
bool channels_last(const Tensor& tensor);

// A new tensor of images, with the channels side by side or row-major.
AOTITorchError make_image(std::int64_t rank, const std::int64_t* sizes, std::int32_t dtype, bool channels_last,
                          Handle* result);

template <class T>
T* elements(const Tensor& tensor) {
  return reinterpret_cast<T*>(tensor.data());
}

// The lines of a tensor along one axis, each by the numbers of the other axes. One for a tensor without axes.
class Lines {
 public:
  Lines(const Tensor& like, std::int32_t axis) : like_(like), axis_(axis) {
    for (std::int32_t other = 0; other < like.rank; ++other)
      if (other != axis) count_ *= like.sizes[other];
  }

  std::int64_t count() const { return count_; }
  std::int64_t size() const { return like_.rank == 0 ? 1 : like_.sizes[axis_]; }

  // Where line `number` begins in a tensor whose strides these are, in elements.
  std::int64_t begin(std::int64_t number, const std::int64_t* strides) const {
    std::int64_t at = 0;
    for (std::int32_t other = like_.rank; other-- > 0;) {
      if (other == axis_) continue;
      at += number % like_.sizes[other] * strides[other];
      number /= like_.sizes[other];
    }
    return at;
  }

  std::int64_t step(const std::int64_t* strides) const { return like_.rank == 0 ? 1 : strides[axis_]; }

 private:
  const Tensor& like_;
  std::int32_t axis_;
  std::int64_t count_ = 1;
};

}  // namespace mctl::shim
