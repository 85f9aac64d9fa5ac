// How a new version is judged: histograms, bounds, decisions; with the vectors that runner/rollout.py runs too.
#include <boost/test/unit_test.hpp>
#include <cmath>

#include "registry/change.h"
#include "registry/rollout.h"
#include "support.h"

namespace mctl {
namespace {

namespace json = boost::json;

Latencies latencies_in(const json::value& values) {
  Latencies latencies;
  for (const auto& value : values.as_array())
    latencies.add(value.at(0).as_int64(), static_cast<std::uint64_t>(value.at(1).as_int64()));
  return latencies;
}

LatenciesByBucket buckets_in(const json::value& compute) {
  LatenciesByBucket buckets;
  for (const auto& [bucket, values] : compute.as_object()) buckets[bucket] = latencies_in(values);
  return buckets;
}

VersionCounts counted_in(const json::object& watched, std::string_view name) {
  const auto* counted = watched.if_contains(name);
  if (counted == nullptr) return {};
  return {counted->at("requests").as_int64(), counted->at("errors").as_int64(), buckets_in(counted->at("compute"))};
}

Watched watched_in(const json::object& object) {
  Watched watched;
  const auto* can_answer = object.if_contains("can_answer");
  const auto number = [&](std::string_view name) {
    const auto* value = object.if_contains(name);
    return value != nullptr ? value->as_int64() : 0;
  };
  watched.can_answer = can_answer == nullptr || can_answer->as_bool();
  if (const auto* failed = object.if_contains("failed")) watched.failed = failed->as_string();
  watched.fresh = counted_in(object, "fresh");
  watched.old = counted_in(object, "old");
  watched.compared = number("compared");
  watched.differed = number("differed");
  watched.held_ms = number("held_ms");
  return watched;
}

// A state whose model `m` has this rollout.
DesiredState state_with(const json::value& rollout) {
  const auto state =
      parse_state(json::serialize(json::value{{"schema", "mctl.state/1"},
                                              {"models",
                                               {{"m",
                                                 {{"versions", {{"3", {{"bundle", "a"}}}, {"4", {{"bundle", "b"}}}}},
                                                  {"labels", {{"stable", "3"}}},
                                                  {"traffic", {{"stable", 100}}},
                                                  {"rollout", rollout}}}}}}));
  BOOST_REQUIRE_MESSAGE(state, why(state));
  return *state;
}

bool close(double one, double other) { return std::abs(one - other) <= 1e-7 * std::abs(other) + 1e-12; }

BOOST_AUTO_TEST_SUITE(registry_rollout)

BOOST_AUTO_TEST_CASE(bin_vectors) {
  const auto tests = vectors("registry/bounds.json");
  for (const auto& test : tests.at("bins").as_array()) {
    const std::size_t bin = Latencies::bin_of(test.at(0).as_int64());
    BOOST_TEST(Latencies::lower_ns(bin) == test.at(1).as_int64());
    BOOST_TEST(Latencies::upper_ns(bin) == test.at(2).as_int64());
  }
  for (std::size_t bin = 1; bin + 1 < Latencies::kBins; ++bin) {
    const std::int64_t lower = Latencies::lower_ns(bin), upper = Latencies::upper_ns(bin);
    BOOST_TEST(Latencies::bin_of(lower) == bin);
    BOOST_TEST(Latencies::bin_of(upper - 1) == bin);
    BOOST_TEST(static_cast<double>(upper) / static_cast<double>(lower) <= 1.0 + 1.0 / 32);
  }
}

BOOST_AUTO_TEST_CASE(histograms_add_up) {
  Latencies one = latencies_in(json::parse("[[2000,3],[50000,1]]")), sum;
  sum.add(one);
  sum.add(Latencies());
  sum.add(one);
  BOOST_TEST(sum.count() == 8u);
  BOOST_TEST(sum.quantile_ns(0.75) == 2016);
  BOOST_TEST(sum.quantile_ns(0.76) == 50176);
  BOOST_TEST(json::serialize(sum.to_json()) == "[[1984,6],[49152,2]]");
  BOOST_TEST(Latencies().quantile_ns(0.5) == 0);
}

BOOST_AUTO_TEST_CASE(bound_vectors) {
  const auto tests = vectors("registry/bounds.json");
  for (const auto& test : tests.at("tails").as_array())
    BOOST_TEST(close(binomial_tail(test.at("n").as_int64(), test.at("x").as_int64(), test.at("p").as_double()),
                     test.at("tail").as_double()),
               json::serialize(test));
  for (const auto& test : tests.at("rates").as_array()) {
    const std::int64_t x = test.at("x").as_int64(), n = test.at("n").as_int64();
    const double level = test.at("level").as_double(), bound = test.at("bound").as_double();
    BOOST_TEST(close(lower_bound_of_rate(x, n, level), bound), json::serialize(test));
    BOOST_TEST(rate_is_above(x, n, bound * 0.999, level) == (x > 0));
    BOOST_TEST(!rate_is_above(x, n, bound * 1.001, level));
  }
}

BOOST_AUTO_TEST_CASE(ratio_vectors) {
  const auto tests = vectors("registry/bounds.json");
  for (const auto& test : tests.at("ratios").as_array()) {
    BOOST_TEST_CONTEXT(test.at("name") << ", " << test.at("level")) {
      const auto ratio = ratio_of_quantiles(buckets_in(test.at("fresh")), buckets_in(test.at("old")), 0.99,
                                            test.at("level").as_double());
      const auto& expect = test.at("expect");
      BOOST_TEST_REQUIRE(ratio.has_value() == !expect.is_null());
      if (!ratio) continue;
      BOOST_TEST(ratio->compared == expect.at("compared").as_int64());
      BOOST_TEST(close(ratio->lower_bound, expect.at("lower_bound").as_double()));
      BOOST_TEST(close(ratio->estimate, expect.at("estimate").as_double()));
    }
  }
}

BOOST_AUTO_TEST_CASE(rollout_vectors) {
  const std::string moves[] = {"wait", "go_on", "promote", "take_back"};
  const auto tests = vectors("registry/rollouts.json");
  for (const auto& test : tests.as_array()) {
    BOOST_TEST_CONTEXT(test.at("name")) {
      const DesiredState state = state_with(test.at("rollout"));
      const Rollout& rollout = *state.models.at("m").rollout;
      const auto& expect = test.at("expect").as_object();
      const RolloutVerdict verdict = judge(rollout, watched_in(test.at("watched").as_object()));
      BOOST_TEST(moves[static_cast<std::size_t>(verdict.move)] == expect.at("move").as_string());
      BOOST_TEST(verdict.gate == expect.at("gate").as_string());
      BOOST_TEST(verdict.text == expect.at("text").as_string());
      const auto patch = patch_of("m", rollout, verdict);
      BOOST_TEST_REQUIRE(patch.has_value() == (verdict.move != Move::wait));
      if (!patch) continue;
      if (const auto* expected = expect.if_contains("patch")) BOOST_TEST(patch->at("models").at("m") == *expected);
      const auto after = changed(state, *patch, Owner::folder, ChangedBy::server);
      BOOST_REQUIRE_MESSAGE(after, why(after));
      const ModelState& model = after->models.at("m");
      BOOST_TEST(model.labels.at("stable") == (verdict.move == Move::promote ? "4" : "3"));
      if (verdict.move != Move::take_back) continue;
      BOOST_TEST((model.rollout->phase == RolloutPhase::taken_back));
      BOOST_TEST(model.rollout->reason == verdict.text);
      BOOST_TEST(model.rollout->evidence.at("gate").as_string() == verdict.gate);
    }
  }
}

BOOST_AUTO_TEST_CASE(evidence_has_both_histograms_and_the_worst_requests) {
  const DesiredState state =
      state_with(json::parse(R"({"version":"4","from":"3","phase":"step","gates":{"p99":1.2}})"));
  Watched watched;
  watched.fresh = {300, 0, buckets_in(json::parse(R"({"8":[[150000,300]]})"))};
  watched.old = {9000, 2, buckets_in(json::parse(R"({"8":[[50000,5000]]})"))};
  watched.worst = {"q-17"};
  const auto verdict = judge(*state.models.at("m").rollout, watched);
  BOOST_TEST(
      json::value(verdict.evidence) ==
      json::parse(
          R"({"gate":"p99","at":"step 1 of 4, 1 %","new":{"requests":300,"errors":0,"compute_ns":{"8":[[147456,300]]}},
          "old":{"requests":9000,"errors":2,"compute_ns":{"8":[[49152,5000]]}},"compared":0,"differed":0,
          "requests":["q-17"]})"));
}

BOOST_AUTO_TEST_CASE(a_server_that_starts_again_goes_on) {
  const auto resumed = [](const char* rollout) {
    const auto patch = resumption("m", state_with(json::parse(rollout)).models.at("m"));
    return patch ? json::serialize(patch->at("models").at("m").at("rollout")) : "";
  };
  BOOST_TEST(resumed(R"({"version":"4","from":"3","phase":"step","step":2,"gates":{"p99":1.2}})") == "");
  BOOST_TEST(resumed(R"({"version":"4","from":"3","phase":"step","step":3,"gates":{"p99":1.2}})") == R"({"step":2})");
  BOOST_TEST(resumed(R"({"version":"4","from":"3","phase":"step","step":3,"gates":{"errors":0.1}})") == "");
  BOOST_TEST(resumed(R"({"version":"4","from":"3","phase":"promoted","step":3,"gates":{"p99":1.2}})") == "");
}

BOOST_AUTO_TEST_CASE(back_to_the_version_before) {
  const auto rolled_back = [](const DesiredState& state) {
    const auto patch = rollback("m", state.models.at("m"));
    BOOST_REQUIRE_MESSAGE(patch, why(patch));
    const auto after = changed(state, *patch, Owner::folder, ChangedBy::server);
    BOOST_REQUIRE_MESSAGE(after, why(after));
    return *after;
  };
  const auto running = rolled_back(state_with(json::parse(R"({"version":"4","from":"3","phase":"step","step":1})")));
  BOOST_TEST((running.models.at("m").rollout->phase == RolloutPhase::taken_back));
  BOOST_TEST(running.models.at("m").rollout->reason == "by hand");

  DesiredState state = state_with(json::parse(R"({"version":"4","from":"3","phase":"promoted"})"));
  ModelState& model = state.models.at("m");
  BOOST_TEST((rollback("m", model).error().code == Code::conflict));
  model.labels["stable"] = "4";
  model.previous = "3";
  model.traffic = {{"4", 90}, {"3", 10}};
  const ModelState back = rolled_back(state).models.at("m");
  BOOST_TEST(back.labels.at("stable") == "3");
  BOOST_TEST(back.previous == "4");
  BOOST_TEST((back.traffic == decltype(back.traffic){{"stable", 100}}));

  model = {};
  model.versions = {{"9", {"a", "", {}}}, {"10", {"b", "", {}}}};
  BOOST_TEST(rolled_back(state).models.at("m").labels.at("stable") == "9");
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace mctl
