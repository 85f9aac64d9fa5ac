// Which version answers: by weights exactly, by keys steadily; with tests/vectors/registry/traffic.json.
#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <map>
#include <random>

#include "registry/traffic.h"
#include "support.h"

namespace mctl {
namespace {

namespace json = boost::json;

std::vector<Share> shares_in(const json::value& list) {
  std::vector<Share> shares;
  for (const auto& item : list.as_array())
    shares.push_back({std::string(item.at(0).as_string()), item.at(1).as_int64()});
  return shares;
}

std::string text_of(const std::vector<Share>& shares) {
  std::string text;
  for (const Share& share : shares) text += share.version + ':' + std::to_string(share.percent) + ' ';
  return text;
}

ModelState model_of(const json::value& value) {
  std::string fault;
  ModelState model = model_from_json(value, "m", fault);
  BOOST_REQUIRE_EQUAL(fault, "");
  return model;
}

std::vector<std::size_t> order_of(const std::vector<std::int64_t>& percents, std::size_t count) {
  Schedule schedule(percents);
  std::vector<std::size_t> order;
  while (order.size() < count) order.push_back(schedule.next());
  return order;
}

// Shares of a hundred, each at least 1.
std::vector<std::int64_t> random_percents(std::mt19937& random, std::size_t parts) {
  std::vector<std::int64_t> cuts = {0, 100}, percents;
  while (cuts.size() <= parts) {
    const std::int64_t cut = std::uniform_int_distribution<std::int64_t>(1, 99)(random);
    if (std::ranges::find(cuts, cut) == cuts.end()) cuts.push_back(cut);
  }
  std::ranges::sort(cuts);
  for (std::size_t i = 1; i < cuts.size(); ++i) percents.push_back(cuts[i] - cuts[i - 1]);
  return percents;
}

// After any number of requests within one of its share, and of any hundred in a row exactly its share.
void expect_exact(const std::vector<std::int64_t>& percents) {
  const auto order = order_of(percents, 400);
  const double most = 1 - 1 / (2.0 * static_cast<double>(percents.size()) - 2);  // Tijdeman's bound
  for (std::size_t i = 0; i < percents.size(); ++i) {
    std::vector<std::int64_t> had = {0};
    for (const std::size_t one : order) had.push_back(had.back() + (one == i));
    double worst = 0;
    bool exact = true;
    for (std::size_t t = 0; t < had.size(); ++t) {
      worst = std::max(worst, std::abs(static_cast<double>(had[t]) -
                                       0.01 * static_cast<double>(percents[i] * static_cast<std::int64_t>(t))));
      exact &= t < 100 || had[t] - had[t - 100] == percents[i];
    }
    BOOST_TEST(worst <= most + 1e-9);
    BOOST_TEST(exact);
  }
}

BOOST_AUTO_TEST_SUITE(registry_traffic)

BOOST_AUTO_TEST_CASE(share_vectors) {
  const auto tests = vectors("registry/traffic.json");
  for (const auto& test : tests.at("shares").as_array()) {
    BOOST_TEST_CONTEXT(std::string(test.at("name").as_string())) {
      const auto able = json::value_to<std::vector<std::string>>(test.at("can_answer"));
      const auto shares = shares_of(model_of(test.at("model")), [&](const std::string& version) {
        return std::ranges::find(able, version) != able.end();
      });
      BOOST_TEST(text_of(shares) == text_of(shares_in(test.at("expect"))));
    }
  }
}

BOOST_AUTO_TEST_CASE(order_vectors) {
  const auto tests = vectors("registry/traffic.json");
  for (const auto& test : tests.at("orders").as_array()) {
    const std::string expected(test.at("order").as_string());
    std::string order;
    for (const std::size_t one :
         order_of(json::value_to<std::vector<std::int64_t>>(test.at("percents")), expected.size()))
      order += static_cast<char>('0' + one);
    BOOST_TEST(order == expected);
  }
}

BOOST_AUTO_TEST_CASE(any_hundred_requests_are_shared_exactly) {
  for (std::int64_t percent = 1; percent < 100; ++percent) expect_exact({percent, 100 - percent});
  std::mt19937 random(7);
  for (std::size_t parts = 3; parts <= 8; ++parts)
    for (int i = 0; i < 20; ++i) expect_exact(random_percents(random, parts));
  expect_exact(std::vector<std::int64_t>(100, 1));
}

BOOST_AUTO_TEST_CASE(key_vectors) {
  const auto tests = vectors("registry/traffic.json");
  for (const auto& test : tests.at("keys").as_array()) {
    Traffic traffic;
    traffic.set(shares_in(test.at("shares")));
    for (const auto& [key, version] : test.at("keys").as_object())
      BOOST_TEST(*traffic.of_key(key) == version.as_string(), std::string(key));
  }
}

std::vector<std::string> versions_of_users(std::vector<Share> shares) {
  Traffic traffic;
  traffic.set(std::move(shares));
  std::vector<std::string> versions;
  for (int user = 0; user < 20'000; ++user) versions.push_back(*traffic.of_key("user-" + std::to_string(user)));
  return versions;
}

BOOST_AUTO_TEST_CASE(as_many_users_move_as_weights_move) {
  std::vector<std::string> before = versions_of_users({{"1", 99}, {"2", 1}});
  for (const std::int64_t percent : {2, 10, 50, 95, 100}) {
    const auto after = versions_of_users(percent < 100 ? std::vector<Share>{{"1", 100 - percent}, {"2", percent}}
                                                       : std::vector<Share>{{"2", 100}});
    std::int64_t there = 0, back = 0;
    for (std::size_t user = 0; user < after.size(); ++user) {
      there += after[user] == "2";
      back += before[user] == "2" && after[user] == "1";
    }
    BOOST_TEST(back == 0);  // only from the version that has less to the one that has more
    // Five standard deviations of a count of 20,000.
    const double share = 0.01 * static_cast<double>(percent);
    BOOST_TEST(std::abs(static_cast<double>(there) - 20'000 * share) <= 5 * std::sqrt(20'000 * share * (1 - share)));
    before = after;
  }
}

BOOST_AUTO_TEST_CASE(only_users_of_a_version_that_cannot_answer_move) {
  const auto before = versions_of_users({{"1", 50}, {"2", 30}, {"3", 20}}),
             after = versions_of_users({{"1", 50}, {"2", 30}});
  for (std::size_t user = 0; user < after.size(); ++user)
    if (before[user] != "3") BOOST_REQUIRE_EQUAL(after[user], before[user]);
}

BOOST_AUTO_TEST_CASE(the_place_in_the_order_is_kept) {
  Traffic traffic, undisturbed;
  for (Traffic* one : {&traffic, &undisturbed}) one->set({{"1", 90}, {"2", 10}});
  for (int i = 0; i < 300; ++i) {
    traffic.set({{"1", 90}, {"2", 10}});
    BOOST_TEST(*traffic.next() == *undisturbed.next());
  }
  traffic.set({});
  BOOST_TEST((traffic.next() == nullptr && traffic.of_key("a") == nullptr));
  traffic.set({{"2", 100}});
  BOOST_TEST(*traffic.next() == "2");
}

BOOST_AUTO_TEST_CASE(what_a_request_names) {
  const ModelState model =
      model_of(json::parse(R"({"versions":{"3":{"bundle":"a"},"10":{"bundle":"b"}},"labels":{"new":"10"}})"));
  BOOST_TEST(*resolve("m", model, "new") == "10");
  BOOST_TEST(*resolve("m", model, "3") == "3");
  const auto none = resolve("m", model, "4");
  BOOST_TEST_REQUIRE(!none);
  BOOST_TEST((none.error().code == Code::not_found));
  BOOST_TEST(none.error().text == "model `m` has no version or label `4`, but `3`, `10`, `new`");
}

BOOST_AUTO_TEST_CASE(a_gate_for_mismatch_shadows_the_new_version) {
  ModelState model = model_of(json::parse(
      R"({"versions":{"1":{"bundle":"a"},"2":{"bundle":"b"}},"shadow":{"version":"1","percent":5},
          "rollout":{"version":"2","from":"1","gates":{"mismatch":0.01}}})"));
  BOOST_TEST(shadow_of(model)->version == "2");
  BOOST_TEST(shadow_of(model)->percent == 5);
  model.shadow.reset();
  BOOST_TEST(shadow_of(model)->percent == 100);
  model.rollout->gates.mismatch.reset();
  BOOST_TEST(!shadow_of(model));
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace mctl
