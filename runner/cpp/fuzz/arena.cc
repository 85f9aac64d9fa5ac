// What a worker writes to the memory that it shares with the front: what the front reads of it keeps its bounds, and
// its texts can stand in JSON and on a terminal.
#include "pool/arena.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>

#include "check.h"
#include "format/text.h"

namespace mctl {
namespace {

Arena& shared() {
  static Arena arena = *Arena::create({{64}, {64}});
  return arena;
}

// Over and over, until all of a state is written; its parts come from different places of the bytes.
template <class State>
void write(State& state, std::span<const std::uint8_t> bytes, std::size_t from) {
  auto* to = reinterpret_cast<std::uint8_t*>(&state);
  for (std::size_t i = 0; i < sizeof state; ++i) to[i] = bytes[(from + i) % bytes.size()];
}

void can_be_shown(std::string_view text, std::size_t most) {
  require(text.size() <= most, "a text ends where its room ends");
  require(is_utf8(text), "a text is UTF-8");
  const auto plain = [](char byte) {
    return byte == '\n' || (static_cast<unsigned char>(byte) >= 0x20 && byte != 0x7f);
  };
  require(std::ranges::all_of(text, plain), "a text has no control characters");
}

void check_worker() {
  const WorkerReport report = shared().report();
  require(report.phase <= Phase::failed, "a phase is one");
  require(report.warm.size() <= kMaxWarm, "no more costs than there is room for");
  for (const double seconds : report.seconds) require(seconds >= 0 && seconds <= 1e6, "times are times");
  can_be_shown(report.error.text, sizeof WorkerState::error);
  can_be_shown(report.note, sizeof WorkerState::note);
}

void check_slot(int slot) {
  const SlotReport report = shared().report(slot);
  const auto now = std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
  require(report.phase <= SlotPhase::failed, "a slot's phase is one");
  require(0 <= report.begun_ns && report.begun_ns <= report.ended_ns && report.ended_ns <= now, "in order, and past");
  can_be_shown(shared().error(slot), sizeof SlotState::error);
}

}  // namespace
}  // namespace mctl

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace mctl;
  if (size == 0) return 0;
  write(shared().worker(), {data, size}, 0);
  check_worker();
  for (int slot = 0; slot < kSlots; ++slot) {
    write(shared().slot(slot), {data, size}, size / 2 * static_cast<std::size_t>(slot));
    check_slot(slot);
  }
  return 0;
}
