// Shared memory between the front process and one worker: slots, each with room for the contract's largest batch.
//
// WorkerState, then per slot a SlotState, the inputs and the outputs, each on a page boundary.
// The front fills a slot, sets its state to `ready` and rings the worker's doorbell (eventfd); the worker runs it, sets
// `done` or `failed` and rings the front's. Pages are taken by reserve(), before they are touched.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "format/contract.h"
#include "format/result.h"
#include "model/unnamed_file.h"

namespace mctl {

constexpr int kSlots = 2;
constexpr std::size_t kMaxWarm = 4096;

enum class Phase : std::uint32_t { starting, verify, load, warmup, golden, ready, failed };

struct WorkerState {
  std::int64_t max_rows;  // what create() was given
  std::atomic<Phase> phase;
  double seconds[4];  // verify, load, warmup, golden
  // What warmed batches took the last time: each one's sizes in the contract's order, then nanoseconds.
  std::int64_t warm[kMaxWarm];
  std::uint32_t warm_count;  // of numbers in `warm`; batches that found no room are left out
  std::uint32_t code;        // Code of `error` when phase is failed
  char error[4096];
  char note[512];  // for the operator, when it is ready
};

enum class SlotPhase : std::uint32_t { idle, ready, running, done, failed };

struct SlotState {
  std::atomic<SlotPhase> phase;
  std::uint32_t variant;                // index in the manifest
  std::int64_t dims[kMaxDims];          // sizes to run with, padding included, in the contract's order
  std::atomic<std::uint64_t> begun_ns;  // CLOCK_MONOTONIC, around the model's own call; 0: not yet
  std::uint64_t ended_ns;
  char error[1024];
};

class Arena {
 public:
  // An unnamed file, its size sealed if it is in memory; Code::host if there is no room for it. `max_rows`: the most
  // rows of the batch dim that a slot has to hold, if that is less than the contract's maximum.
  static Result<Arena> create(const Contract& contract, std::optional<std::int64_t> max_rows = std::nullopt);
  // In the worker: the size has to be the contract's. The descriptor is the arena's from now on.
  static Result<Arena> attach(int fd, const Contract& contract);
  Arena(Arena&& other) noexcept { swap(other); }
  Arena& operator=(Arena&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Arena();

  // Makes sure that this side may touch a slot as far as tensors of these sizes reach. Code::host: there is no memory.
  Status reserve(int slot, const Contract& contract, const DimSizes& dims);

  int fd() const { return fd_; }
  const std::string& folder() const { return folder_; }  // that create() had to use; empty: it is in memory
  WorkerState& worker();
  SlotState& slot(int index);
  std::span<std::byte> input(int slot, std::size_t index);  // as large as any sizes of the dims need
  std::span<std::byte> output(int slot, std::size_t index);

 private:
  struct Area {
    std::size_t offset, bytes;                 // within the slot
    std::array<std::size_t, kSlots> reserved;  // bytes
  };
  Arena() = default;
  void swap(Arena& other) noexcept;
  Status lay_out(const Contract& contract, std::optional<std::int64_t> max_rows);
  Status map();
  Status set_size(const UnnamedFile& file) const;
  Status reserve(int slot, const std::vector<Tensor>& tensors, std::vector<Area>& areas, const DimSizes& dims);
  std::size_t slot_offset(int slot) const;
  std::byte* slot_base(int slot) const;

  int fd_ = -1;
  std::byte* base_ = nullptr;
  std::size_t size_ = 0, slot_bytes_ = 0;
  std::vector<Area> inputs_, outputs_;
  std::string folder_;
};

}  // namespace mctl
