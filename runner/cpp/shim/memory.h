// Memory of tensors: blocks that are kept and given out again, so that a call asks the system for nothing that an
// earlier one has given back.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace mctl::shim {

constexpr std::size_t kAlignment = 64;

// The header of a block; its bytes follow, aligned.
struct alignas(kAlignment) Block {
  std::atomic<std::int64_t> users;
  std::size_t bytes;  // that it has, not those that were asked for
  Block* next;

  std::byte* data() { return reinterpret_cast<std::byte*>(this + 1); }
};

// A block of at least so many bytes, with one user. Null: there is no memory.
Block* allocate(std::size_t bytes);

inline void share(Block* block) { block->users.fetch_add(1, std::memory_order_relaxed); }

// One user fewer; without any the block is free for others.
void release(Block* block);

// Bytes that were had of the system: in use, and kept.
std::size_t held_bytes();

}  // namespace mctl::shim
