#include "memory.h"

#include <bit>
#include <cstdlib>
#include <limits>
#include <mutex>
#include <new>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, size) ((void)(size))
#define ASAN_UNPOISON_MEMORY_REGION(address, size) ((void)(size))
#endif

namespace mctl::shim {
namespace {

// Four sizes for each power of two: at most a fifth of a block is not used.
constexpr std::size_t kSteps = 4, kSmallest = 256, kBins = kSteps * 64;
constexpr std::size_t kLookUp = kSteps;               // bins above the right one: a block up to twice as large will do
constexpr std::size_t kSpare = std::size_t{1} << 20;  // is kept beside what was once in use

struct Bin {
  std::size_t index, bytes;
};

Bin bin_of(std::size_t bytes) {
  if (bytes <= kSmallest) return {0, kSmallest};
  const auto shift = static_cast<std::size_t>(std::bit_width(bytes - 1)) - 3;  // the step is an eighth of the power
  const std::size_t steps = (bytes + (std::size_t{1} << shift) - 1) >> shift;  // 5..8 of them
  return {(shift - 5) * kSteps + steps - kSteps, steps << shift};
}

class Memory {
 public:
  Block* allocate(std::size_t bytes) {
    if (bytes > std::numeric_limits<std::size_t>::max() / 4) return nullptr;
    const Bin bin = bin_of(bytes);
    Block* block = nullptr;
    {
      const std::lock_guard lock(mutex_);
      block = kept(bin.index);
      if (block == nullptr) block = fresh(bin.bytes);
      if (block == nullptr) return nullptr;
      in_use_ += block->bytes;
      if (in_use_ > most_in_use_) most_in_use_ = in_use_;
    }
    block->users.store(1, std::memory_order_relaxed);
    ASAN_UNPOISON_MEMORY_REGION(block->data(), bytes);
    return block;
  }

  void give_back(Block* block) {
    ASAN_POISON_MEMORY_REGION(block->data(), block->bytes);
    const std::lock_guard lock(mutex_);
    in_use_ -= block->bytes;
    Block*& bin = bins_[bin_of(block->bytes).index];
    block->next = bin;
    bin = block;
    make_room(0);
  }

  std::size_t held() {
    const std::lock_guard lock(mutex_);
    return held_;
  }

 private:
  Block* kept(std::size_t index) {
    for (std::size_t at = index; at <= index + kLookUp && at < kBins; ++at)
      if (Block* block = bins_[at]) {
        bins_[at] = block->next;
        return block;
      }
    return nullptr;
  }

  // Frees the largest blocks that nobody uses until `more` bytes would not be too many.
  void make_room(std::size_t more) {
    const std::size_t allowed = most_in_use_ + most_in_use_ / 2 + kSpare;
    for (std::size_t at = kBins; at-- > 0 && held_ + more > allowed;)
      while (bins_[at] != nullptr && held_ + more > allowed) {
        Block* block = bins_[at];
        bins_[at] = block->next;
        held_ -= block->bytes;
        std::free(block);
      }
  }

  Block* fresh(std::size_t bytes) {
    make_room(bytes);
    void* place = std::aligned_alloc(kAlignment, sizeof(Block) + bytes);
    if (place == nullptr) return nullptr;
    held_ += bytes;
    Block* block = new (place) Block{};
    block->bytes = bytes;
    ASAN_POISON_MEMORY_REGION(block->data(), bytes);
    return block;
  }

  std::mutex mutex_;
  Block* bins_[kBins] = {};
  std::size_t held_ = 0, in_use_ = 0, most_in_use_ = 0;
};

Memory memory;

}  // namespace

Block* allocate(std::size_t bytes) { return memory.allocate(bytes); }

void release(Block* block) {
  if (block->users.fetch_sub(1, std::memory_order_acq_rel) == 1) memory.give_back(block);
}

std::size_t held_bytes() { return memory.held(); }

}  // namespace mctl::shim
