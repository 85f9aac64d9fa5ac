// Shared memory between the front process and one worker: slots, each with room for the contract's largest batch.
//
// One page of WorkerState, then per slot a SlotState page, the inputs and the outputs, each on a page boundary.
// The front fills a slot, sets its state to `ready` and rings the worker's doorbell (eventfd); the worker runs it, sets
// `done` or `failed` and rings the front's. Pages are taken when they are first touched.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "contract.h"
#include "result.h"

namespace mctl {

constexpr int kSlots = 2;

enum class Phase : std::uint32_t { starting, verify, load, warmup, golden, ready, failed };

struct WorkerState {
  std::atomic<Phase> phase;
  double seconds[4];   // verify, load, warmup, golden
  std::uint32_t code;  // Code of `error` when phase is failed
  char error[4096];
};

enum class SlotPhase : std::uint32_t { idle, ready, running, done, failed };

struct SlotState {
  std::atomic<SlotPhase> phase;
  std::uint32_t variant;             // index in the manifest
  std::int64_t dims[kMaxDims];       // sizes to run with, padding included, in the contract's order
  std::uint64_t begun_ns, ended_ns;  // CLOCK_MONOTONIC, around the model's own call
  char error[1024];
};

class Arena {
 public:
  static Result<Arena> create(const Contract& contract);  // a memfd; Code::host if it is larger than memory maps
  static Result<Arena> attach(int fd, const Contract& contract);  // in the worker; sizes are checked
  Arena(Arena&&) noexcept;
  Arena& operator=(Arena&&) noexcept;
  ~Arena();

  int fd() const { return fd_; }
  WorkerState& worker();
  SlotState& slot(int index);
  std::span<std::byte> input(int slot, std::size_t index);  // capacity of the contract's maximum
  std::span<std::byte> output(int slot, std::size_t index);

 private:
  Arena() = default;
  int fd_ = -1;
  std::byte* base_ = nullptr;
  std::size_t size_ = 0, slot_bytes_ = 0;
  struct Area {
    std::size_t offset, bytes;  // within the slot
  };
  std::vector<Area> inputs_, outputs_;
};

}  // namespace mctl
