// The batching policy against the vectors that Python runs too, by a simulation that keeps runner/policy.py's rule 8.
#include "policy.h"

#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <filesystem>
#include <map>
#include <numeric>

#include "batcher.h"
#include "support.h"

namespace mctl {
namespace {

namespace json = boost::json;

struct Arrival : Call {
  void finished(const Error*) override {}
  std::int64_t index = 0, done_us = 0;
  bool rejected = false, unserved = false;
};

struct Simulation {
  BatchSettings settings;
  std::int64_t fixed_us, per_row_us, free;
  std::optional<std::int64_t> drain_at;
  std::vector<std::shared_ptr<Arrival>> arrivals;
  std::vector<std::string> keys;
  std::size_t arrived = 0;
  Queue queue;
  std::vector<std::int64_t> running;
  json::array batches;

  explicit Simulation(const json::object& vector) {
    const auto& set = vector.at("settings").as_object();
    settings.max_batch_size = set.at("max_batch_size").as_int64();
    settings.max_queue_size = set.at("max_queue_size").as_int64();
    settings.max_queue_delay_us = set.at("max_queue_delay_us").as_int64();
    settings.default_timeout_us = set.at("default_timeout_us").as_int64();
    for (const auto& size : set.at("allowed_batch_sizes").as_array()) {
      settings.allowed_batch_sizes.push_back(size.as_int64());
    }
    fixed_us = vector.at("cost").at("fixed_us").as_int64();
    per_row_us = vector.at("cost").at("per_row_us").as_int64();
    free = vector.at("instances").as_int64();
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
    arrivals.push_back(arrival);
    keys.emplace_back(item.at("key").as_string());
  }

  void run() {
    for (std::optional<std::int64_t> now = 0; now;) now = step(*now);
  }

  std::optional<std::int64_t> step(std::int64_t now) {
    for (const Waiting& request : take_expired(queue, now)) arrival_of(request).unserved = true;
    const bool draining = drain_at && *drain_at <= now;
    for (; arrived < arrivals.size() && arrivals[arrived]->arrival_ns <= now; ++arrived) arrive(arrived, draining);
    free += std::erase_if(running, [&](std::int64_t end) { return end <= now; });
    Decision decision;
    for (;;) {
      decision = decide(settings, queue, now, free > 0 ? Room::free : Room::none, draining);
      if (decision.batch.empty()) break;
      start(decision, now);
    }
    std::vector<std::int64_t> nexts = running;
    if (arrived < arrivals.size()) nexts.push_back(arrivals[arrived]->arrival_ns);
    if (decision.wake_us) nexts.push_back(*decision.wake_us);
    if (drain_at && !draining) nexts.push_back(*drain_at);
    if (nexts.empty()) return std::nullopt;
    return *std::min_element(nexts.begin(), nexts.end());
  }

  static Arrival& arrival_of(const Waiting& request) { return static_cast<Arrival&>(*request.call); }

  void arrive(std::size_t index, bool draining) {
    const auto& arrival = arrivals[index];
    const auto waiting = std::accumulate(queue.begin(), queue.end(), std::int64_t{0},
                                         [](std::int64_t sum, const Waiting& w) { return sum + w.rows; });
    arrival->rejected = draining || !settings.admits(waiting, arrival->rows);
    for (std::int64_t row = 0; row < arrival->rows && !arrival->rejected; row += settings.limit()) {
      const std::int64_t rows = std::min(settings.limit(), arrival->rows - row);
      queue.push_back({arrival->arrival_ns, arrival->deadline_ns, rows, keys[index], arrival, row, false});
    }
  }

  void start(const Decision& decision, std::int64_t now) {
    const std::int64_t padded = settings.padded(decision.rows), end = now + fixed_us + per_row_us * padded;
    json::array requests;
    for (const std::size_t index : decision.batch) {
      requests.push_back(arrival_of(queue[index]).index);
      arrival_of(queue[index]).done_us = end;
    }
    batches.push_back({{"start_us", now},
                       {"requests", requests},
                       {"rows", decision.rows},
                       {"padded", padded},
                       {"reason", name_of(decision.reason)}});
    for (auto index = decision.batch.rbegin(); index != decision.batch.rend(); ++index) {
      queue.erase(queue.begin() + static_cast<std::ptrdiff_t>(*index));
    }
    --free;
    running.push_back(end);
  }

  json::array completions() const {
    json::array list;
    for (const auto& arrival : arrivals) {
      const bool late = arrival->unserved || arrival->done_us >= arrival->deadline_ns;
      const auto at = arrival->rejected ? arrival->arrival_ns : late ? arrival->deadline_ns : arrival->done_us;
      const auto* status = arrival->rejected ? "rejected" : late ? "expired" : "ok";
      list.push_back({{"request", arrival->index}, {"at_us", at}, {"status", status}});
    }
    return list;
  }
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
    }
    ++count;
  }
  BOOST_TEST(count >= 28u);
}

BOOST_AUTO_TEST_CASE(policy_ahead_takes_only_what_waiting_cannot_improve) {
  const BatchSettings settings{.max_batch_size = 4, .max_queue_size = 99, .allowed_batch_sizes = {}};
  Queue queue;
  for (std::int64_t i = 0; i < 3; ++i) queue.push_back({i, 1000, 1, "", nullptr, 0, false});
  BOOST_TEST(decide(settings, queue, 10, Room::ahead, false).batch.empty());
  BOOST_TEST(decide(settings, queue, 10, Room::free, false).batch.size() == 3u);
  queue.push_back({3, 1000, 1, "", nullptr, 0, false});
  BOOST_TEST(decide(settings, queue, 10, Room::ahead, false).batch.size() == 4u);
}

}  // namespace
}  // namespace mctl
