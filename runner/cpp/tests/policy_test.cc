// The batching policy against the vectors that Python runs too, by the simulation of runner/simulator.py.
#include "engine/policy.h"

#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <filesystem>
#include <map>
#include <span>

#include "engine/batcher.h"
#include "engine/pace.h"
#include "support.h"

namespace mctl {
namespace {

namespace json = boost::json;

struct Arrival : Call {
  void finished(const Error*) override {}
  std::int64_t index = 0, done_us = 0;
  std::optional<std::int64_t> rejected_us;
  bool unserved = false;
};

struct Cost {
  std::int64_t fixed_us, per_row_us, from_us;
};

struct Instance {
  std::optional<Ran> batch, ahead;  // what it runs, or ran last; and before that
  std::int64_t began_us = 0;
  std::vector<std::int64_t> waits_us;
  bool busy = false;
};

struct Simulation {
  BatchSettings settings;
  std::optional<Pace> pace;
  std::vector<Cost> costs;
  std::vector<Instance> instances;
  std::optional<std::int64_t> drain_at;
  std::vector<std::shared_ptr<Arrival>> arrivals;
  std::vector<std::string> keys;
  std::size_t arrived = 0;
  Queue queue;
  Shares shares;
  json::array batches, limits;
  std::int64_t told_limit = 0;

  explicit Simulation(const json::object& vector) {
    const auto& set = vector.at("settings").as_object();
    settings.max_batch_size = set.at("max_batch_size").as_int64();
    settings.max_queue_size = set.at("max_queue_size").as_int64();
    settings.max_queue_delay_us = set.at("max_queue_delay_us").as_int64();
    settings.default_timeout_us = set.at("default_timeout_us").as_int64();
    for (const auto& size : set.at("allowed_batch_sizes").as_array()) {
      settings.allowed_batch_sizes.push_back(size.as_int64());
    }
    if (const auto* sizes = set.if_contains("unpadded_sizes")) {
      for (const auto& size : sizes->as_array()) settings.unpadded_sizes.push_back(size.as_int64());
    }
    if (const auto* target = set.if_contains("latency_target_us")) settings.latency_target_us = target->as_int64();
    if (const auto* percentile = set.if_contains("percentile")) settings.percentile = percentile->as_int64();
    pace.emplace(settings);
    told_limit = pace->limit();
    std::vector<Seed> seeds;
    if (const auto* list = vector.if_contains("seeds")) {
      for (const auto& seed : list->as_array()) {
        seeds.push_back(
            {pace->kind(std::string(seed.at(0).as_string())), seed.at(1).as_int64(), seed.at(2).as_int64()});
      }
    }
    pace->seed(seeds);
    note_limit(0);
    for (const auto& item : vector.at("costs").as_array()) {
      const auto* from = item.as_object().if_contains("from_us");
      costs.push_back({item.at("fixed_us").as_int64(), item.at("per_row_us").as_int64(), from ? from->as_int64() : 0});
    }
    instances.resize(static_cast<std::size_t>(vector.at("instances").as_int64()));
    if (const auto* at = vector.if_contains("drain_at_us")) drain_at = at->as_int64();
    for (const auto& item : vector.at("arrivals").as_array()) add(item.as_object());
  }

  void add(const json::object& item) {
    auto arrival = std::make_shared<Arrival>();
    const auto* timeout = item.if_contains("timeout_us");
    arrival->index = static_cast<std::int64_t>(arrivals.size());
    arrival->rows = item.at("rows").as_int64();
    arrival->arrival_ns = item.at("at_us").as_int64();  // both in microseconds here
    arrival->deadline_ns = arrival->arrival_ns + (timeout ? timeout->as_int64() : settings.default_timeout_us);
    arrival->deadline_stated = timeout != nullptr;
    if (const auto* client = item.if_contains("client")) arrival->client = client->to_number<Client>();
    arrivals.push_back(arrival);
    keys.emplace_back(item.at("key").as_string());
  }

  void run() {
    for (std::optional<std::int64_t> now = 0; now;) now = step(*now);
  }

  std::optional<std::int64_t> step(std::int64_t now) {
    for (const Waiting& request : take_expired(queue, now)) {
      arrival_of(request).unserved = true;
      left(request);
    }
    const bool draining = drain_at && *drain_at <= now;
    for (; arrived < arrivals.size() && arrivals[arrived]->arrival_ns <= now; ++arrived) arrive(arrived, draining, now);
    for (Instance& instance : instances) {
      if (instance.busy && instance.began_us + instance.batch->took_us <= now) finish(instance, now);
    }
    Decision decision;
    for (;;) {
      const auto free = std::ranges::find(instances, false, &Instance::busy);
      const Room room = free != instances.end() ? Room::free : Room::none;
      decision = decide(settings, pace->limit(), queue, now, room, draining);
      if (decision.batch.empty()) break;
      start(*free, decision, now);
    }
    std::vector<std::int64_t> nexts;
    for (const Instance& instance : instances) {
      if (instance.busy) nexts.push_back(instance.began_us + instance.batch->took_us);
    }
    if (arrived < arrivals.size()) nexts.push_back(arrivals[arrived]->arrival_ns);
    if (decision.wake_us) nexts.push_back(*decision.wake_us);
    if (drain_at && !draining) nexts.push_back(*drain_at);
    if (nexts.empty()) return std::nullopt;
    return *std::min_element(nexts.begin(), nexts.end());
  }

  static Arrival& arrival_of(const Waiting& request) { return static_cast<Arrival&>(*request.call); }

  void arrive(std::size_t index, bool draining, std::int64_t now) {
    const auto& arrival = arrivals[index];
    const std::string& key = keys[index];
    const std::size_t kind = pace->kind(key);
    const bool admitted = settings.admits(pace->rows(), arrival->rows) ||
                          shares.entitled(arrival->client, arrival->rows, settings.max_queue_size);
    arrival->rejected_us = now;
    if (draining || !admitted) return;
    const std::int64_t timeout = arrival->deadline_ns - arrival->arrival_ns;
    const bool first = !shares.waits(arrival->client);
    const Estimate estimate = pace->estimate(key, kind, arrival->rows, free_after(now), first);
    if (estimate.too_late(pace->time_us(timeout, arrival->deadline_stated))) {
      pace->refused(kind, arrival->deadline_stated);
      return note_limit(now);
    }
    arrival->rejected_us.reset();
    make_room(arrival->rows, now);
    for (std::int64_t row = 0; row < arrival->rows; row += pace->limit()) {
      const std::int64_t rows = std::min(pace->limit(), arrival->rows - row);
      const Client client = arrival->client;
      const std::int64_t turn = shares.join(client, rows);
      enqueue(queue, {arrival->arrival_ns, arrival->deadline_ns, rows, key, arrival, row, false, kind, client, turn});
    }
    pace->joined(key, kind, arrival->rows);
  }

  // It waits no longer.
  void left(const Waiting& request) {
    pace->left(request.key, request.rows);
    shares.leave(request.client, request.rows);
  }

  void make_room(std::int64_t rows, std::int64_t now) {
    while (!settings.admits(pace->rows(), rows)) {
      const auto call = last_of(queue, shares.largest());
      BOOST_REQUIRE(call != nullptr);
      static_cast<Arrival&>(*call).rejected_us = now;
      std::erase_if(queue, [&](const Waiting& request) { return request.call == call && (left(request), true); });
    }
  }

  // By the costs that are known, not by those that are true.
  std::span<std::int64_t> free_after(std::int64_t now) {
    free_after_us.clear();
    for (const Instance& instance : instances) {
      const std::int64_t end =
          instance.busy ? instance.began_us + pace->cost(instance.batch->batch.kind, instance.batch->batch.padded)
                        : now;
      free_after_us.push_back(std::max<std::int64_t>(0, end - now));
    }
    return free_after_us;
  }

  void start(Instance& instance, const Decision& decision, std::int64_t now) {
    const auto cost =
        std::ranges::find_if(costs.rbegin(), costs.rend(), [&](const Cost& c) { return c.from_us <= now; });
    const Waiting& first = queue[decision.batch.front()];
    const Formed formed = pace->formed(first.kind, decision.rows, decision.reason == Reason::full);
    instance.ahead = instance.batch;
    instance.batch = Ran{formed, cost->fixed_us + cost->per_row_us * formed.padded};
    instance.began_us = now;
    instance.busy = true;
    instance.waits_us.clear();
    json::array requests;
    for (const std::size_t index : decision.batch) {
      requests.push_back(arrival_of(queue[index]).index);
      Arrival& arrival = arrival_of(queue[index]);
      arrival.done_us = std::max(arrival.done_us, now + instance.batch->took_us);
      instance.waits_us.push_back(now - queue[index].arrival_us);
      left(queue[index]);
      shares.started(queue[index].turn);
    }
    batches.push_back({{"start_us", now},
                       {"requests", requests},
                       {"rows", decision.rows},
                       {"padded", formed.padded},
                       {"reason", name_of(decision.reason)}});
    for (auto index = decision.batch.rbegin(); index != decision.batch.rend(); ++index) {
      queue.erase(queue.begin() + static_cast<std::ptrdiff_t>(*index));
    }
  }

  void finish(Instance& instance, std::int64_t now) {
    instance.busy = false;
    pace->finished(instance.batch->batch, instance.batch->took_us, instance.waits_us, instance.ahead);
    note_limit(now);
  }

  void note_limit(std::int64_t now) {
    if (pace->limit() == told_limit) return;
    told_limit = pace->limit();
    limits.push_back({{"at_us", now}, {"limit", told_limit}});
  }

  json::array completions() const {
    json::array list;
    for (const auto& arrival : arrivals) {
      const bool late = arrival->unserved || arrival->done_us >= arrival->deadline_ns;
      const auto at = arrival->rejected_us.value_or(late ? arrival->deadline_ns : arrival->done_us);
      const auto* status = arrival->rejected_us ? "rejected" : late ? "expired" : "ok";
      list.push_back({{"request", arrival->index}, {"at_us", at}, {"status", status}});
    }
    return list;
  }

  std::vector<std::int64_t> free_after_us;
};

BOOST_AUTO_TEST_CASE(policy_vectors) {
  std::size_t count = 0;
  for (const auto& file : std::filesystem::directory_iterator(VECTORS "/batching")) {
    const auto vector = vectors("batching/" + file.path().filename().string()).as_object();
    BOOST_TEST_CONTEXT(std::string(vector.at("name").as_string())) {
      Simulation simulation(vector);
      simulation.run();
      BOOST_TEST(json::serialize(simulation.batches) == json::serialize(vector.at("expect").at("batches")));
      BOOST_TEST(json::serialize(simulation.completions()) == json::serialize(vector.at("expect").at("completions")));
      const auto* limits = vector.at("expect").as_object().if_contains("limits");
      BOOST_TEST(json::serialize(simulation.limits) == json::serialize(limits ? *limits : json::array()));
    }
    ++count;
  }
  BOOST_TEST(count >= 60u);
}

BOOST_AUTO_TEST_CASE(pace_the_first_seed_stays) {
  const BatchSettings settings{.max_batch_size = 4, .max_queue_size = 99, .allowed_batch_sizes = {}};
  Pace pace(settings);
  const std::size_t kind = pace.kind("a");
  BOOST_TEST(pace.kind("a") == kind);
  BOOST_TEST(pace.kind("b") != kind);
  for (const std::int64_t us : {700, 900}) {
    const Seed seed{kind, 2, us};
    pace.seed({&seed, 1});
  }
  BOOST_TEST(pace.cost(kind, 2) == 700);
  BOOST_TEST(pace.cost(kind, 1) == 0);
}

BOOST_AUTO_TEST_CASE(pace_kinds_are_bounded) {
  const BatchSettings settings{.max_batch_size = 4, .max_queue_size = 99, .allowed_batch_sizes = {}};
  Pace pace(settings);
  std::size_t last = 0;
  for (int i = 0; i < 5000; ++i) last = std::max(last, pace.kind(std::to_string(i)));
  BOOST_TEST(last == 1023u);
  BOOST_TEST(pace.kind("0") == 0u);
}

BOOST_AUTO_TEST_CASE(policy_ahead_takes_only_what_waiting_cannot_improve) {
  const BatchSettings settings{.max_batch_size = 4, .max_queue_size = 99, .allowed_batch_sizes = {}};
  Queue queue;
  for (std::int64_t i = 0; i < 3; ++i) queue.push_back({i, 1000, 1, "", nullptr, 0, false});
  BOOST_TEST(decide(settings, 4, queue, 10, Room::ahead, false).batch.empty());
  BOOST_TEST(decide(settings, 4, queue, 10, Room::free, false).batch.size() == 3u);
  queue.push_back({3, 1000, 1, "", nullptr, 0, false});
  BOOST_TEST(decide(settings, 4, queue, 10, Room::ahead, false).batch.size() == 4u);
}

}  // namespace
}  // namespace mctl
