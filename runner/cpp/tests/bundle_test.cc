// A worker on a real bundle: runner-tests --run_test=bundle_ -- BUNDLE LIBTORCH. Expected numbers: what eager gave, as
// it is stored in the bundle's golden cases.
#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <boost/test/unit_test.hpp>
#include <chrono>
#include <csignal>
#include <cstring>

#include "format/archive.h"
#include "format/safetensors.h"
#include "pool/arena.h"
#include "pool/model_areas.h"
#include "pool/worker.h"
#include "support.h"

namespace mctl {
namespace {

namespace unit_test = boost::unit_test;

std::string argument(int index) {
  const auto& suite = unit_test::framework::master_test_suite();
  BOOST_REQUIRE_GT(suite.argc, index);
  return suite.argv[index];
}

// A copy in memory, which a test may damage.
int copy_of(const std::string& bytes) {
  const int fd = memfd_create("bundle", MFD_CLOEXEC);
  BOOST_REQUIRE_EQUAL(write(fd, bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
  return fd;
}

// The front's side of one worker.
struct Front {
  Manifest manifest;
  std::optional<Archive> archive;
  std::optional<Arena> arena;
  WorkerOptions options;
  pid_t child = 0;

  explicit Front(int bundle_fd, std::optional<std::int64_t> max_rows = std::nullopt) {
    auto opened = Archive::open(bundle_fd);
    BOOST_REQUIRE_MESSAGE(opened, why(opened));
    archive = std::move(*opened);
    auto read = read_manifest(*archive);
    BOOST_REQUIRE_MESSAGE(read, why(read));
    manifest = std::move(*read);
    auto created = Arena::create(*model_areas(manifest.contract, max_rows));
    BOOST_REQUIRE_MESSAGE(created, why(created));
    arena = std::move(*created);
    options.bundle_fd = bundle_fd;
    options.arena_fd = arena->fd();
    options.max_rows = max_rows;
    options.wake_fd = eventfd(0, EFD_CLOEXEC);
    options.done_fd = eventfd(0, EFD_CLOEXEC);
    options.libtorch = argument(2);
  }

  ~Front() {
    if (child > 0) {
      kill(child, SIGKILL);
      waitpid(child, nullptr, 0);
    }
  }

  void start() {
    child = fork();
    if (child == 0) _exit(run_worker(options));
  }

  bool heard() const {
    pollfd waiting{options.done_fd, POLLIN, 0};
    std::uint64_t count = 0;
    return poll(&waiting, 1, 120'000) == 1 && read(options.done_fd, &count, sizeof count) == sizeof count;
  }

  Phase settled() {
    while (true) {
      const Phase phase = arena->worker().phase.load();
      if (phase == Phase::ready || phase == Phase::failed || !heard()) return phase;
    }
  }

  void wake(std::uint64_t count) const {
    BOOST_REQUIRE_EQUAL(write(options.wake_fd, &count, sizeof count), static_cast<ssize_t>(sizeof count));
  }

  SlotPhase run(int slot, std::uint32_t variant, const DimSizes& dims) {
    SlotState& state = arena->slot(slot);
    state.variant = variant;
    std::copy(dims.begin(), dims.end(), state.dims);
    state.phase.store(SlotPhase::ready);
    wake(1);
    while (true) {
      const SlotPhase phase = state.phase.load();
      if (phase == SlotPhase::done || phase == SlotPhase::failed) return phase;
      BOOST_REQUIRE(heard());
    }
  }
};

int bundle() { return open(argument(1).c_str(), O_RDONLY | O_CLOEXEC); }

double largest_error(std::span<const std::byte> got, std::span<const std::byte> wanted) {
  double largest = 0;
  for (std::size_t i = 0; i + sizeof(float) <= wanted.size(); i += sizeof(float)) {
    float a, b;
    std::memcpy(&a, got.data() + i, sizeof a);
    std::memcpy(&b, wanted.data() + i, sizeof b);
    largest = std::max(largest, static_cast<double>(std::abs(a - b)) / (1 + std::abs(b)));
  }
  return largest;
}

// Copies a golden case's inputs into a slot.
DimSizes fill(Front& front, int slot, const Golden& golden, const StoredTensors& tensors) {
  DimSizes dims;
  for (const Dim& dim : front.manifest.contract.dims) dims.push_back(golden.dims.at(dim.name));
  for (std::size_t i = 0; i < front.manifest.contract.inputs.size(); ++i) {
    const auto& data = tensors.at("input." + front.manifest.contract.inputs[i].name).data;
    std::copy(data.begin(), data.end(), front.arena->input(slot, i).begin());
  }
  return dims;
}

BOOST_AUTO_TEST_SUITE(bundle_, *unit_test::disabled())

BOOST_AUTO_TEST_CASE(numbers_are_eagers_in_both_slots) {
  Front front(bundle());
  const auto begin = std::chrono::steady_clock::now();
  front.start();
  BOOST_REQUIRE_MESSAGE(front.settled() == Phase::ready, front.arena->worker().error);
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
  const double* seconds = front.arena->worker().seconds;
  BOOST_TEST_MESSAGE("fork to ready " << taken.count() << " s: verify " << seconds[0] << ", load " << seconds[1]
                                      << ", warm-up " << seconds[2] << ", golden " << seconds[3]);
  BOOST_TEST(!front.manifest.golden.empty());
  for (int slot = 0; slot < kSlots; ++slot)
    for (const Golden& golden : front.manifest.golden) {
      const auto mapping = front.archive->map(golden.member, true);
      BOOST_REQUIRE(mapping);
      const auto tensors = read_tensors(mapping->bytes());
      BOOST_REQUIRE(tensors);
      const DimSizes dims = fill(front, slot, golden, *tensors);
      BOOST_TEST((front.run(slot, 0, dims) == SlotPhase::done), front.arena->slot(slot).error);
      for (std::size_t i = 0; i < front.manifest.contract.outputs.size(); ++i) {
        const Tensor& output = front.manifest.contract.outputs[i];
        if (output.dtype != Dtype::f32 || !front.manifest.contract.state.empty()) continue;
        BOOST_TEST(largest_error(front.arena->output(slot, i), tensors->at("output." + output.name).data) < 1e-4,
                   golden.name);
      }
    }
}

BOOST_AUTO_TEST_CASE(state_is_fresh_when_ready) {
  Front front(bundle());
  if (front.manifest.contract.state.empty()) return;
  front.start();
  BOOST_REQUIRE_MESSAGE(front.settled() == Phase::ready, front.arena->worker().error);
  const Golden& golden = front.manifest.golden[0];
  const auto mapping = front.archive->map(golden.member, true);
  const auto tensors = read_tensors(mapping->bytes());
  const DimSizes dims = fill(front, 0, golden, *tensors);
  const auto differs = [&] {
    BOOST_TEST((front.run(0, 0, dims) == SlotPhase::done), front.arena->slot(0).error);
    double largest = 0;
    for (std::size_t i = 0; i < front.manifest.contract.outputs.size(); ++i)
      largest = std::max(largest, largest_error(front.arena->output(0, i),
                                                tensors->at("output." + front.manifest.contract.outputs[i].name).data));
    return largest > 1e-4;
  };
  BOOST_TEST(!differs());  // the first call is eager's first
  BOOST_TEST(differs());   // and then the state has moved on
}

BOOST_AUTO_TEST_CASE(a_small_arena_is_warmed_to_its_rows) {
  Front front(bundle(), 3);
  front.start();
  BOOST_TEST((front.settled() == Phase::ready), front.arena->worker().error);
}

BOOST_AUTO_TEST_CASE(a_worker_ends_where_nobody_can_ring) {
  Front front(bundle());
  int ends[2];
  BOOST_REQUIRE_EQUAL(pipe2(ends, O_CLOEXEC), 0);
  front.options.wake_fd = ends[0];
  close(ends[1]);
  front.start();
  int status = -1;
  waitpid(std::exchange(front.child, 0), &status, 0);
  BOOST_TEST(status == 0);
}

BOOST_AUTO_TEST_CASE(a_slot_that_makes_no_sense_fails_alone) {
  Front front(bundle());
  front.start();
  BOOST_REQUIRE_MESSAGE(front.settled() == Phase::ready, front.arena->worker().error);
  DimSizes dims;
  for (const Dim& dim : front.manifest.contract.dims) dims.push_back(dim.min);
  BOOST_TEST((front.run(1, 99, dims) == SlotPhase::failed));
  BOOST_TEST(std::string(front.arena->slot(1).error) == "there is no such variant");
  BOOST_TEST((front.run(0, 0, dims) == SlotPhase::done));
}

BOOST_AUTO_TEST_CASE(a_call_costs_little) {
  Front front(bundle());
  front.start();
  BOOST_REQUIRE_MESSAGE(front.settled() == Phase::ready, front.arena->worker().error);
  DimSizes dims;
  for (const Dim& dim : front.manifest.contract.dims) dims.push_back(dim.min);
  double best_call = 1e9, best_trip = 1e9;
  for (int i = 0; i < 2000; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    BOOST_REQUIRE((front.run(0, 0, dims) == SlotPhase::done));
    const std::chrono::duration<double, std::micro> trip = std::chrono::steady_clock::now() - begin;
    const SlotState& slot = front.arena->slot(0);
    best_trip = std::min(best_trip, trip.count());
    best_call = std::min(best_call, static_cast<double>(slot.ended_ns - slot.begun_ns) / 1000);
  }
  BOOST_TEST_MESSAGE("smallest call " << best_call << " us, round trip " << best_trip << " us");
  BOOST_TEST(best_trip < best_call + 1000);
}

BOOST_AUTO_TEST_CASE(a_changed_member_is_refused) {
  const std::string sound = read_file(argument(1));
  Front front(copy_of(sound));
  for (const auto& [path, entry] : front.archive->members()) {
    if (path == "extra/mctl/manifest.json" || entry.size == 0) continue;
    std::string damaged = sound;
    damaged[entry.offset + entry.size / 2] ^= 1;
    Front worker(copy_of(damaged));
    worker.start();
    BOOST_TEST((worker.settled() == Phase::failed), path);
    BOOST_TEST(std::string(worker.arena->worker().error) ==
               "member `" + path + "` does not have the SHA-256 that the manifest says");
  }
}

BOOST_AUTO_TEST_CASE(no_libtorch_is_told) {
  Front front(bundle());
  front.options.libtorch = "/nowhere";
  front.start();
  BOOST_TEST((front.settled() == Phase::failed));
  BOOST_TEST(front.arena->worker().code == static_cast<std::uint32_t>(Code::host));
  BOOST_TEST(std::string(front.arena->worker().error).starts_with("cannot load libtorch: "));
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace mctl
