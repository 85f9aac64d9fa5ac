// The batcher with a pool that is no process: the test plays the workers, and nothing is timed.
#include "engine/batcher.h"

#include <atomic>
#include <boost/test/unit_test.hpp>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <thread>

#include "format/text.h"
#include "pool/model_areas.h"
#include "support.h"

namespace mctl {
namespace {

using Values = std::vector<std::int32_t>;

constexpr std::int64_t kHour = 3'600'000'000'000;  // ns

// y[batch] = x[batch] + 100, as far as the workers below do it.
Manifest manifest_of() {
  Manifest manifest;
  Contract& contract = manifest.contract;
  contract.dims = {{"batch", 1, 4, 1}};
  const auto rows = [&] { return std::vector{*Expression::parse("batch", contract.dims)}; };
  contract.inputs = {{"x", Dtype::i32, rows(), std::nullopt, std::nullopt}};
  contract.outputs = {{"y", Dtype::i32, rows(), std::nullopt, std::nullopt}};
  contract.batch_dim = 0;
  manifest.buckets = {{"batch", {1, 2, 4}}};
  manifest.variants.push_back({});
  manifest.variants.back().name = "dynamic";
  manifest.variants.back().covers = {{"batch", {1, 4}}};
  return manifest;
}

struct Request final : Call {
  explicit Request(Values x) : values(std::move(x)) {
    rows = static_cast<std::int64_t>(values.size());
    dims = {rows};
    inputs = {std::as_bytes(std::span(values))};
    arrival_ns = now_ns();
    deadline_ns = arrival_ns + kHour;
  }
  void finished(const Error* failed) override {
    ++times;
    if (failed) error = *failed;
    if (failed) return;
    answer.resize(outputs[0].data.size() / sizeof(std::int32_t));
    std::memcpy(answer.data(), outputs[0].data.data(), outputs[0].data.size());
  }

  Values values, answer;
  int times = 0;
  std::optional<Error> error;
};

struct Still final : Pool {
  explicit Still(const Contract& contract, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) arenas.push_back(*Arena::create(*model_areas(contract)));
  }
  std::size_t size() const override { return arenas.size(); }
  bool live(std::size_t) const override { return alive; }
  Arena& arena(std::size_t worker) override { return arenas[worker]; }
  void ring(std::size_t worker) override { rung.push_back(worker); }
  void proved(std::size_t) override {}
  void kill(std::size_t worker, const std::string& why) override { killed.emplace_back(worker, why); }
  const Error* spoiled() override { return fault ? &*fault : nullptr; }
  std::optional<Error> away() const override { return gone; }
  std::chrono::nanoseconds patience() const override { return std::chrono::hours(1); }

  std::vector<Arena> arenas;
  std::vector<std::size_t> rung;
  std::vector<std::pair<std::size_t, std::string>> killed;
  bool alive = true;
  std::optional<Error> fault, gone;
};

struct Engine {
  explicit Engine(std::size_t workers = 1, std::int64_t queue = 100)
      : pool(manifest.contract, workers),
        batcher(io, manifest, lookup, packing,
                {.max_batch_size = 4, .max_queue_size = queue, .allowed_batch_sizes = {1, 2, 4}}, std::chrono::hours(1),
                pool, metrics) {}

  std::shared_ptr<Request> submit(Values x, Client client = 0) {
    auto request = std::make_shared<Request>(std::move(x));
    request->client = client;
    last = batcher.submit(request);
    return request;
  }
  // One batch runs and a full one is assembled behind it.
  void occupy() {
    submit({1});
    turn();
    submit({1, 1, 1, 1});
    turn();
  }
  void turn() {
    io.restart();
    io.poll();
  }
  // The sizes of the batch that a worker is to run, or runs, in a slot; 0: none.
  std::int64_t batch(int slot, std::size_t worker = 0) {
    const SlotState& state = pool.arena(worker).slot(slot);
    return state.phase == SlotPhase::ready || state.phase == SlotPhase::running ? state.dims[0] : 0;
  }
  void finish(int slot, std::size_t worker = 0) {
    SlotState& state = pool.arena(worker).slot(slot);
    Values values(static_cast<std::size_t>(state.dims[0]));
    std::memcpy(values.data(), pool.arena(worker).input(slot, 0).data(), values.size() * 4);
    for (std::int32_t& value : values) value += 100;
    std::memcpy(pool.arena(worker).output(slot, 0).data(), values.data(), values.size() * 4);
    end(slot, SlotPhase::done, worker);
  }
  void end(int slot, SlotPhase phase, std::size_t worker = 0) {
    SlotState& state = pool.arena(worker).slot(slot);
    state.begun_ns = now_ns();
    state.ended_ns = now_ns();
    state.phase = phase;
    batcher.rang(worker);
    turn();
  }

  // The worker ends while it runs what lies in a slot, and another takes its place; true if requests run alone from now
  // on.
  bool die(int slot) {
    pool.arena(0).slot(slot).phase = SlotPhase::running;
    pool.alive = false;
    const bool parts = batcher.died(0);
    turn();
    pool.arenas[0] = *Arena::create(*model_areas(manifest.contract));
    pool.alive = true;
    batcher.changed();
    turn();
    return parts;
  }

  boost::asio::io_context io;
  const Manifest manifest = manifest_of();
  const Lookup lookup{manifest, 1};
  Packing packing{manifest};
  Metrics metrics;
  Still pool;
  Batcher batcher;
  Status last = Done{};
};

BOOST_AUTO_TEST_SUITE(batcher_)

BOOST_AUTO_TEST_CASE(requests_share_a_batch_and_get_their_own_rows) {
  Engine engine;
  const auto one = engine.submit({1}), two = engine.submit({2, 3});
  engine.turn();
  BOOST_TEST(engine.batch(0) == 4);  // three rows, padded
  engine.finish(0);
  BOOST_TEST(one->answer == Values{101}, boost::test_tools::per_element());
  BOOST_TEST(two->answer == (Values{102, 103}), boost::test_tools::per_element());
  BOOST_TEST(one->batch_rows == 3);
  BOOST_TEST(engine.batcher.idle());
}

BOOST_AUTO_TEST_CASE(a_large_request_is_split_and_joined) {
  Engine engine;
  const auto large = engine.submit({1, 2, 3, 4, 5, 6});
  engine.turn();
  BOOST_TEST(engine.batch(0) == 4);
  engine.finish(0);
  BOOST_TEST(large->times == 0);
  BOOST_TEST(engine.batch(1) == 2);
  engine.finish(1);
  BOOST_TEST(large->answer == (Values{101, 102, 103, 104, 105, 106}), boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(a_cancelled_request_never_runs) {
  Engine engine;
  const auto runs = engine.submit({1});
  engine.turn();
  const auto waits = engine.submit({2});
  BOOST_TEST(engine.batcher.cancel(*waits));
  BOOST_TEST(!engine.batcher.cancel(*runs));  // it is too late for that: it will be finished
  engine.finish(0);
  BOOST_TEST(waits->times == 0);
  BOOST_TEST(runs->times == 1);
  BOOST_TEST(runs->cancelled);
  BOOST_TEST(engine.batcher.idle());
}

BOOST_AUTO_TEST_CASE(a_full_queue_refuses) {
  Engine engine(1, 4);
  engine.occupy();
  for (int i = 0; i < 4; ++i) engine.submit({i});
  const auto late = engine.submit({9});
  BOOST_REQUIRE(!engine.last);
  BOOST_TEST((engine.last.error().code == Code::unavailable));
  BOOST_TEST(late->times == 0);
}

BOOST_AUTO_TEST_CASE(who_has_most_of_a_full_queue_makes_room) {
  Engine engine(1, 4);
  engine.occupy();
  std::vector<std::shared_ptr<Request>> many;
  for (int i = 0; i < 4; ++i) many.push_back(engine.submit({i}, 7));
  engine.submit({9}, 8);
  BOOST_TEST(why(engine.last).empty());
  BOOST_REQUIRE(many.back()->error.has_value());
  BOOST_TEST((many.back()->error->code == Code::unavailable));
  BOOST_TEST(many.front()->times == 0);
}

BOOST_AUTO_TEST_CASE(one_bad_request_does_not_fail_the_others) {
  Engine engine;
  const auto good = engine.submit({1}), bad = engine.submit({2});
  engine.turn();
  std::strcpy(engine.pool.arena(0).slot(0).error, "index out of range");
  engine.end(0, SlotPhase::failed);  // the batch of both: each is tried alone
  BOOST_TEST(good->times + bad->times == 0);
  BOOST_TEST(engine.batch(1) == 1);
  engine.finish(1);
  BOOST_TEST(good->answer == Values{101}, boost::test_tools::per_element());
  BOOST_TEST(engine.batch(0) == 1);
  std::strcpy(engine.pool.arena(0).slot(0).error, "index out of range");
  engine.end(0, SlotPhase::failed);
  BOOST_REQUIRE(bad->error.has_value());
  BOOST_TEST((bad->error->code == Code::model));
  BOOST_TEST(bad->error->text == "index out of range");
}

BOOST_AUTO_TEST_CASE(a_death_costs_only_the_culprit) {
  Engine engine;
  const auto good = engine.submit({1}), culprit = engine.submit({2});
  engine.turn();
  engine.die(0);
  BOOST_TEST(engine.batch(0) == 1);
  engine.finish(0);
  BOOST_TEST(good->answer == Values{101}, boost::test_tools::per_element());
  engine.die(1);
  BOOST_TEST(culprit->times == 1);
  BOOST_REQUIRE(culprit->error.has_value());
  BOOST_TEST((culprit->error->code == Code::model));
  BOOST_TEST(engine.batcher.idle());
}

BOOST_AUTO_TEST_CASE(after_two_deaths_requests_run_alone) {
  Engine engine;
  engine.submit({1});
  engine.submit({2});
  engine.turn();
  BOOST_TEST(!engine.die(0));  // both wait, each to run alone
  engine.occupy();
  const auto before = engine.submit({3});
  BOOST_TEST(engine.die(0));
  const auto after = engine.submit({4});
  for (int slot = 0; !engine.batcher.idle(); slot = 1 - slot) {
    BOOST_REQUIRE(engine.batch(slot) != 0);
    engine.finish(slot);
  }
  BOOST_TEST(before->batch_rows == 1);
  BOOST_TEST(after->batch_rows == 1);
  BOOST_TEST(after->answer == Values{104}, boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(caution_lasts_until_no_process_ended_for_a_while) {
  Caution caution;
  BOOST_TEST(!caution.died(0));
  BOOST_TEST(!caution.died(Caution::kWhile_us));  // long after
  BOOST_TEST(!caution.alone(Caution::kWhile_us));
  BOOST_TEST(caution.died(Caution::kWhile_us + 5));
  BOOST_TEST(!caution.died(Caution::kWhile_us + 6));  // they do already
  BOOST_TEST(caution.alone(2 * Caution::kWhile_us + 5));
  BOOST_TEST(!caution.alone(2 * Caution::kWhile_us + 6));
}

BOOST_AUTO_TEST_CASE(a_cancelled_request_does_not_end_a_second_process) {
  Engine engine;
  const auto left = engine.submit({1}), stays = engine.submit({2});
  engine.turn();
  BOOST_TEST(!engine.batcher.cancel(*left));
  engine.die(0);
  BOOST_TEST(left->times == 1);
  BOOST_TEST(left->error.has_value());
  engine.finish(0);
  BOOST_TEST(stays->answer == Values{102}, boost::test_tools::per_element());
  BOOST_TEST(engine.batcher.idle());
}

BOOST_AUTO_TEST_CASE(what_waits_for_a_process_runs_expires_or_is_refused) {
  Engine engine;
  engine.pool.alive = false;
  const auto runs = engine.submit({1});
  auto late = std::make_shared<Request>(Values{2});
  late->deadline_ns = late->arrival_ns;
  BOOST_TEST(why(engine.batcher.submit(late)).empty());
  engine.turn();
  BOOST_REQUIRE(late->error.has_value());
  BOOST_TEST((late->error->code == Code::deadline));
  BOOST_TEST(runs->times == 0);
  engine.pool.alive = true;
  engine.batcher.changed();
  engine.turn();
  engine.finish(0);
  BOOST_TEST(runs->answer == Values{101}, boost::test_tools::per_element());
  engine.pool.alive = false;
  const auto refused = engine.submit({3});
  engine.turn();
  BOOST_TEST(refused->times == 0);
  engine.pool.gone = Error{Code::unavailable, "it cannot start"};
  engine.batcher.changed();
  BOOST_REQUIRE(refused->error.has_value());
  BOOST_TEST(refused->error->text == "it cannot start");
  BOOST_TEST(refused->times == 1);
  BOOST_TEST(engine.batcher.idle());
}

BOOST_AUTO_TEST_CASE(a_deadline_that_passed_is_told_and_nothing_runs) {
  Engine engine;
  auto late = std::make_shared<Request>(Values{1});
  late->deadline_ns = late->arrival_ns;
  late->deadline_stated = true;
  const auto submitted = engine.batcher.submit(late);
  engine.turn();
  const bool told = !submitted || late->error.has_value();
  BOOST_TEST(told);
  BOOST_TEST(engine.batch(0) == 0);
  BOOST_TEST(engine.batcher.idle());
}

BOOST_AUTO_TEST_CASE(two_workers_share_the_work) {
  Engine engine(2);
  engine.submit({1, 2, 3, 4});
  engine.submit({5, 6, 7, 8});
  engine.turn();
  BOOST_TEST(engine.pool.rung == (std::vector<std::size_t>{0, 1}), boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(answers_of_a_spoiled_bundle_are_withheld) {
  Engine engine;
  const auto first = engine.submit({1});
  engine.turn();
  const auto second = engine.submit({1, 2});
  engine.turn();
  const auto third = engine.submit({1, 2, 3});
  engine.pool.fault = Error{Code::unavailable, "changed"};
  engine.finish(0);
  for (const auto& request : {first, third}) {
    BOOST_REQUIRE(request->error);
    BOOST_TEST(request->error->text == "changed");
    BOOST_TEST(request->times == 1);
  }
  engine.batcher.died(0);
  BOOST_TEST(second->times == 1);
  BOOST_TEST(second->error.has_value());
}

// What a hostile worker does to the memory that it shares: random bytes and telling numbers anywhere, at any time.
class Vandal {
 public:
  explicit Vandal(Arena& arena) : arena_(arena), thread_([this] { run(); }) {}
  ~Vandal() {
    stop_ = true;
    thread_.join();
  }

 private:
  void run() {
    while (!stop_) {
      const auto which = random_() % (1 + kSlots);
      if (which < kSlots)
        spoil(arena_.slot(static_cast<int>(which)));
      else
        spoil(arena_.worker());
    }
  }
  template <class State>
  void spoil(State& state) {
    constexpr std::uint32_t kTelling[] = {0, 1, 2, 3, 4, 5, 6, 0x7f, 0x7fffffff, 0x80000000, 0x7ff00000, 0xffffffff};
    auto* words = reinterpret_cast<std::uint32_t*>(&state);
    std::size_t at = random_() % (sizeof state / sizeof *words);
    if (random_() % 4 == 0) at %= 16;  // where phases are
    const auto value = random_() % 2 == 0 ? kTelling[random_() % std::size(kTelling)] : random_();
    __atomic_store_n(words + at, static_cast<std::uint32_t>(value), __ATOMIC_RELAXED);
  }

  Arena& arena_;
  std::mt19937_64 random_{7};
  std::atomic<bool> stop_ = false;
  std::thread thread_;
};

void check_reports(const Arena& arena) {
  const WorkerReport worker = arena.report();
  BOOST_REQUIRE(worker.phase <= Phase::failed);
  BOOST_REQUIRE_LE(worker.warm.size(), kMaxWarm);
  for (const double seconds : worker.seconds) BOOST_REQUIRE(seconds >= 0 && seconds <= 1e6);
  BOOST_REQUIRE_LT(worker.error.text.size(), sizeof WorkerState::error + 1);
  for (int slot = 0; slot < kSlots; ++slot) {
    const SlotReport report = arena.report(slot);
    BOOST_REQUIRE(report.phase <= SlotPhase::failed);
    BOOST_REQUIRE(0 <= report.begun_ns && report.begun_ns <= report.ended_ns && report.ended_ns <= now_ns());
    const std::string error = arena.error(slot);
    BOOST_REQUIRE_LE(error.size(), sizeof SlotState::error);
    BOOST_REQUIRE(is_utf8(error) && error.find('\x1b') == std::string::npos && error.find('\0') == std::string::npos);
  }
}

// MCTL_HOSTILE_SECONDS makes it longer.
BOOST_AUTO_TEST_CASE(hostile_memory) {
  const char* given = std::getenv("MCTL_HOSTILE_SECONDS");
  const auto end = now_ns() + (given != nullptr ? std::atoll(given) : 1) * 1'000'000'000;
  std::size_t ended = 0;
  for (std::uint64_t round = 0; now_ns() < end; ++round) {
    Engine engine;  // a new one takes what warming up cost from the report
    const Vandal vandal(engine.pool.arenas[0]);
    std::vector<std::shared_ptr<Request>> requests;
    for (int step = 0; step < 200; ++step) {
      requests.push_back(engine.submit({1, 2}));
      engine.batcher.changed();
      engine.batcher.rang(0);
      engine.turn();
      check_reports(engine.pool.arenas[0]);
      if (step % 50 == 49) engine.batcher.died(0);
    }
    for (const auto& request : requests) {
      BOOST_REQUIRE_LE(request->times, 1);
      if (request->times == 1 && !request->error) BOOST_REQUIRE_EQUAL(request->answer.size(), 2u);
      ended += static_cast<std::size_t>(request->times);
    }
  }
  BOOST_TEST(ended > 0u);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace mctl
