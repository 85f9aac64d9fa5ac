#include "pool/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <thread>

#include "format/manifest.h"
#include "pool/model_areas.h"
#include "small_bundle.h"
#include "support.h"

namespace mctl {
namespace {

Contract small_contract() { return parse_manifest(small_members().back().second)->contract; }

BOOST_AUTO_TEST_SUITE(arena_)

BOOST_AUTO_TEST_CASE(both_sides_see_the_same_bytes) {
  const Contract contract = small_contract();
  auto front = Arena::create(*model_areas(contract));
  BOOST_REQUIRE_MESSAGE(front, why(front));
  auto worker = Arena::attach(dup(front->fd()), *model_areas(contract));
  BOOST_REQUIRE_MESSAGE(worker, why(worker));
  for (int slot = 0; slot < kSlots; ++slot) {
    BOOST_TEST(front->input(slot, 0).size() == 8u * 16 * 4);
    BOOST_TEST(front->input(slot, 1).size() == 8u * 8);
    BOOST_TEST(front->output(slot, 0).size() == 16u * 17 * 4);
    BOOST_TEST(reinterpret_cast<std::uintptr_t>(front->input(slot, 1).data()) % 64 == 0u);
    front->input(slot, 1)[63] = std::byte{7};
    worker->output(slot, 0).back() = std::byte{9};
    BOOST_TEST((worker->input(slot, 1)[63] == std::byte{7}));
    BOOST_TEST((front->output(slot, 0).back() == std::byte{9}));
    worker->slot(slot).phase = SlotPhase::running;
    BOOST_TEST((front->slot(slot).phase == SlotPhase::running));
  }
  BOOST_TEST((front->input(0, 1)[0] == std::byte{0}));
  worker->worker().phase = Phase::warmup;
  BOOST_TEST((front->worker().phase == Phase::warmup));
}

BOOST_AUTO_TEST_CASE(rows_bound_the_slots) {
  const Contract contract = small_contract();
  auto front = Arena::create(*model_areas(contract, 3));
  BOOST_REQUIRE(front);
  BOOST_TEST(front->input(1, 0).size() == 3u * 16 * 4);
  BOOST_TEST(front->output(1, 0).size() == 6u * 17 * 4);
  BOOST_TEST(why(Arena::attach(dup(front->fd()), *model_areas(contract, 3))).empty());
}

BOOST_AUTO_TEST_CASE(the_size_is_sealed_and_checked) {
  Contract contract = small_contract();
  auto front = Arena::create(*model_areas(contract));
  BOOST_REQUIRE(front);
  BOOST_TEST(ftruncate(front->fd(), 0) == -1);
  contract.dims[0].max = 800;
  BOOST_TEST(why(Arena::attach(dup(front->fd()), *model_areas(contract))) == "the arena was made for another contract");
}

// A descriptor that takes nothing stands in for memory that is short.
BOOST_AUTO_TEST_CASE(pages_are_there_before_they_are_touched) {
  const Contract contract = small_contract();
  auto arena = Arena::create(*model_areas(contract, 1 << 10));
  BOOST_REQUIRE(arena);
  const auto taken = [&] {
    struct stat status{};
    BOOST_REQUIRE_EQUAL(fstat(arena->fd(), &status), 0);
    return status.st_blocks * 512;
  };
  const auto before = taken();
  BOOST_TEST(before < (1 << 10) * 16 * 4);  // the head alone: less than the input of one slot
  BOOST_TEST(why(reserve(*arena, 1, contract, {512, 16})).empty());
  const auto after = taken();
  BOOST_TEST(after >= before + 512 * 16 * 4);
  BOOST_TEST(why(reserve(*arena, 1, contract, {100, 16})).empty());
  BOOST_TEST(taken() == after);
  const int nothing = open("/dev/null", O_RDONLY | O_CLOEXEC);
  BOOST_REQUIRE_EQUAL(dup2(nothing, arena->fd()), arena->fd());
  close(nothing);
  BOOST_TEST(why(reserve(*arena, 0, contract, {512, 16})) ==
             "no room for the model's largest batch: Bad file descriptor; choose a smaller `--max-batch-size`");
}

BOOST_AUTO_TEST_CASE(an_output_that_shrinks_has_room) {
  Contract contract = small_contract();
  contract.outputs[0].shape = {*Expression::parse("20-n", contract.dims)};
  auto front = Arena::create(*model_areas(contract));
  BOOST_REQUIRE(front);
  BOOST_TEST(front->output(0, 0).size() == 16u * 4);
}

BOOST_AUTO_TEST_CASE(what_has_no_room) {
  Contract contract = small_contract();
  contract.dims[0].max = contract.dims[1].max = std::int64_t{1} << 40;
  BOOST_TEST(why(model_areas(contract)).starts_with("no room for the model's largest batch: "));
  contract.dims[0].max = std::int64_t{1} << 20;
  contract.dims[1].max = std::int64_t{1} << 30;
  const auto beyond_memory = Arena::create(*model_areas(contract));
  BOOST_TEST((!beyond_memory && beyond_memory.error().code == Code::host));
  contract.outputs[0].shape = {*Expression::parse("n//(batch-3)", contract.dims)};
  BOOST_TEST(why(Arena::create(*model_areas(small_contract(), 1 << 30))).empty());
}

// Front and worker as two threads at the same addresses, where ThreadSanitizer sees what a phase does not order. As in
// batcher.cc and worker.cc: bytes, then `ready` with release; acquire, bytes, then `done` with release; acquire again.
BOOST_AUTO_TEST_CASE(a_phase_hands_over_the_bytes) {
  constexpr int rounds = 2000;
  auto arena = Arena::create(*model_areas(small_contract()));
  BOOST_REQUIRE(arena);
  const auto await = [&](int slot, SlotPhase phase) {
    while (arena->slot(slot).phase.load(std::memory_order_acquire) != phase) std::this_thread::yield();
  };
  std::thread worker([&] {
    for (int round = 0; round < rounds; ++round) {
      const int slot = round % kSlots;
      await(slot, SlotPhase::ready);
      SlotState& state = arena->slot(slot);
      state.phase.store(SlotPhase::running, std::memory_order_relaxed);
      std::ranges::fill(arena->output(slot, 0).first(static_cast<std::size_t>(state.dims[0])),
                        arena->input(slot, 1)[0]);
      state.ended_ns = static_cast<std::uint64_t>(round);
      state.phase.store(SlotPhase::done, std::memory_order_release);
    }
  });
  int right = 0;
  for (int round = 0; round < rounds + kSlots; ++round) {
    const int slot = round % kSlots;
    SlotState& state = arena->slot(slot);
    if (round >= kSlots) {  // what was asked for a turn ago
      await(slot, SlotPhase::done);
      const auto wanted = static_cast<std::byte>(round - kSlots);
      const auto rows = arena->output(slot, 0).first(static_cast<std::size_t>(state.dims[0]));
      right += std::ranges::count(rows, wanted) == state.dims[0] &&
               state.ended_ns == static_cast<std::uint64_t>(round - kSlots);
    }
    if (round >= rounds) continue;
    arena->input(slot, 1)[0] = static_cast<std::byte>(round);
    state.dims[0] = 1 + round % 8;
    state.phase.store(SlotPhase::ready, std::memory_order_release);
  }
  worker.join();
  BOOST_TEST(right == rounds);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace mctl
