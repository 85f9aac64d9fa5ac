// Shared memory between the front process and one worker: slots, each with room for the largest batch.
//
// WorkerState, then per slot a SlotState and its areas, those of inputs and those of outputs, each on a page boundary.
// Which areas there are, and how large, is for the kind of worker to say: both sides have to say the same.
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

// What the front reads of the two above is copied once and checked then: a hostile worker writes anything, at any time.
struct WorkerReport {
  Phase phase = Phase::starting;    // failed, if what stands there is no phase
  std::array<double, 4> seconds{};  // as above; none is negative or without end
  std::vector<std::int64_t> warm;   // as above, of any values
  Error error;                      // what it said when it failed
  std::string note;
};
struct SlotReport {
  SlotPhase phase = SlotPhase::running;     // if what stands there is no phase
  std::int64_t begun_ns = 0, ended_ns = 0;  // in this order, and not later than now; 0: not yet
};

// The bytes of each area of a slot.
struct Areas {
  std::vector<std::size_t> inputs, outputs;
};

class Arena {
 public:
  // An unnamed file, its size sealed if it is in memory; Code::host if there is no room for it.
  static Result<Arena> create(const Areas& areas);
  // In the worker: Code::internal if it was made with other areas. The descriptor is the arena's from now on.
  static Result<Arena> attach(int fd, const Areas& areas);
  Arena(Arena&& other) noexcept { swap(other); }
  Arena& operator=(Arena&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Arena();

  // Make sure that this side may touch the first `bytes` of an area. Code::host: there is no memory.
  Status reserve_input(int slot, std::size_t index, std::size_t bytes) { return reserve(slot, inputs_[index], bytes); }
  Status reserve_output(int slot, std::size_t index, std::size_t bytes) {
    return reserve(slot, outputs_[index], bytes);
  }

  int fd() const { return fd_; }
  const std::string& folder() const { return folder_; }  // that create() had to use; empty: it is in memory
  WorkerState& worker();                                 // for the worker to write
  SlotState& slot(int index);  // for the front to write when it is idle, for the worker afterwards
  WorkerReport report() const;
  SlotReport report(int slot) const;
  std::string error(int slot) const;
  std::span<std::byte> input(int slot, std::size_t index);  // the whole area
  std::span<std::byte> output(int slot, std::size_t index);

 private:
  struct Area {
    std::size_t offset, bytes;                 // within the slot
    std::array<std::size_t, kSlots> reserved;  // bytes
  };
  Arena() = default;
  void swap(Arena& other) noexcept;
  Status lay_out(const Areas& areas);
  Status map();
  Status set_size(const UnnamedFile& file) const;
  Status reserve(int slot, Area& area, std::size_t bytes);
  std::size_t slot_offset(int slot) const;
  std::byte* slot_base(int slot) const;

  int fd_ = -1;
  std::byte* base_ = nullptr;
  std::size_t size_ = 0, slot_bytes_ = 0;
  std::vector<Area> inputs_, outputs_;
  std::string folder_;
};

}  // namespace mctl
