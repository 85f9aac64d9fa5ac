// The desired state: read, printed, changed; with the vectors of tests/vectors/registry.
#include <boost/test/unit_test.hpp>

#include "options.h"
#include "registry/change.h"
#include "registry/merge_patch.h"
#include "registry/reading.h"
#include "registry/serve_toml.h"
#include "registry/state.h"
#include "support.h"

namespace mctl {
namespace {

namespace json = boost::json;

std::string text_in(const json::value& value, std::string_view name, std::string otherwise = "") {
  const auto* item = value.as_object().if_contains(name);
  return item != nullptr ? std::string(item->as_string()) : otherwise;
}

std::string joined(const json::value& lines) {
  std::string text;
  for (const auto& line : lines.as_array()) text += std::string(line.as_string()) + '\n';
  text.pop_back();
  return text;
}

DesiredState state_of(const json::value& document) {
  const auto state = parse_state(json::serialize(document));
  BOOST_REQUIRE_MESSAGE(state, why(state));
  return *state;
}

BOOST_AUTO_TEST_SUITE(registry_state)

BOOST_AUTO_TEST_CASE(merge_patch_vectors) {
  const auto tests = vectors("registry/merge_patch.json");
  for (const auto& test : tests.at("cases").as_array()) {
    BOOST_TEST(merged(test.at(0), test.at(1)) == test.at(2));
    const bool has_null = json::serialize(test.at(2)).find("null") != std::string::npos;
    if (!has_null) BOOST_TEST(merged(test.at(0), merge_difference(test.at(0), test.at(2))) == test.at(2));
  }
  BOOST_TEST(merge_difference(json::parse(R"({"a":{"b":1,"c":2},"d":3})"), json::parse(R"({"a":{"b":1,"c":4}})")) ==
             json::parse(R"({"a":{"c":4},"d":null})"));
}

BOOST_AUTO_TEST_CASE(file_vectors) {
  const auto tests = vectors("registry/files.json");
  for (const auto& test : tests.as_array()) {
    BOOST_TEST_CONTEXT(text_in(test, "name")) {
      const std::string text = joined(test.at("text"));
      const auto state = parse_state(text);
      BOOST_TEST(why(state) == text_in(test, "error"));
      if (!state) {
        BOOST_TEST((state.error().code == Code::usage));
        continue;
      }
      const auto again = parse_state(print_state(*state));
      BOOST_REQUIRE_MESSAGE(again, why(again));
      BOOST_TEST((*again == *state));
    }
  }
}

BOOST_AUTO_TEST_CASE(change_vectors) {
  const auto tests = vectors("registry/changes.json");
  const DesiredState before = state_of(tests.at("state"));
  for (const auto& test : tests.at("cases").as_array()) {
    BOOST_TEST_CONTEXT(text_in(test, "name")) {
      const std::string owner = text_in(test, "owner");
      const auto after = changed(before, test.at("patch"),
                                 owner == "folder" ? Owner::folder
                                 : owner == "file" ? Owner::file
                                                   : Owner::state,
                                 text_in(test, "by") == "server" ? ChangedBy::server : ChangedBy::person);
      BOOST_TEST(why(after) == text_in(test, "error"));
      if (!after) {
        const auto* code = test.as_object().if_contains("code");
        BOOST_TEST((after.error().code == (code != nullptr ? Code::conflict : Code::invalid)));
        continue;
      }
      const DesiredState expected = state_of(merged(tests.at("state"), test.at("becomes")));
      BOOST_TEST(print_state(*after) == print_state(expected));
      BOOST_TEST((*after == expected));
      const auto again = parse_state(print_state(*after));
      BOOST_REQUIRE_MESSAGE(again, why(again));
      BOOST_TEST((*again == *after));
    }
  }
}

BOOST_AUTO_TEST_CASE(names_of_all_kinds) {
  const auto with = [](const std::string& name) {
    return why(changed({}, {{"models", {{name, {{"versions", {{"1", {{"bundle", "a"}}}}}}}}}}));
  };
  BOOST_TEST(with(std::string(256, 'a')) == "");
  for (const std::string& name :
       {std::string(300, 'a'), std::string("a b"), std::string("a\nb"), std::string("."), std::string("../x"),
        std::string("\xff"), std::string("a\0b", 3), std::string(), std::string("-x"), std::string("名前")}) {
    const std::string said = with(name);
    BOOST_TEST(said.ends_with("is no name: allowed are letters, digits, `_`, `.` and `-`, at most 256"), said);
    BOOST_TEST(said.find('\n') == std::string::npos);
  }
}

BOOST_AUTO_TEST_CASE(versions_in_numeric_order) {
  const std::vector<std::string> ascending = {
      "a", "v2", "v10", "01", "1", "1.2", "1.9", "1.10", "2", "9", "10", "10b", "99999999999999999999"};
  for (std::size_t i = 0; i < ascending.size(); ++i)
    for (std::size_t j = 0; j < ascending.size(); ++j)
      BOOST_TEST(VersionLess()(ascending[i], ascending[j]) == (i < j), ascending[i] + " < " + ascending[j]);
}

BOOST_AUTO_TEST_CASE(a_printed_state_is_for_people) {
  const auto state = parse_state(R"({"schema":"mctl.state/1","models":{"m":{"versions":{"10":{"bundle":"b"},
    "9":{"bundle":"a"}},"rollout":{"version":"10","gates":{"errors":0.001,"p99":1.5}}}}})");
  BOOST_REQUIRE(state);
  BOOST_TEST(print_state(*state) == R"({
  "schema": "mctl.state/1",
  "models": {
    "m": {
      "versions": {"9": {"bundle": "a"}, "10": {"bundle": "b"}},
      "rollout": {
        "version": "10",
        "steps": [1, 10, 50, 100],
        "hold_s": 60,
        "min_requests": 200,
        "gates": {"errors": 0.001, "p99": 1.5},
        "phase": "loading",
        "step": 0
      },
      "keep": 1
    }
  }
}
)");
  const auto begun = completed(*state);
  BOOST_REQUIRE_MESSAGE(begun, why(begun));
  BOOST_TEST(begun->models.at("m").rollout->from == "9");
  BOOST_TEST(begun->models.at("m").labels.at("stable") == "9");
}

BOOST_AUTO_TEST_CASE(two_operators_at_once) {
  const DesiredState before = state_of(vectors("registry/changes.json").at("state"));
  const std::string read = etag_of(print_state(before));
  BOOST_TEST(why(check_if_match(read, read)) == "");
  BOOST_TEST(why(check_if_match("", read)) == "");
  BOOST_TEST(why(check_if_match("*", read)) == "");
  BOOST_TEST(why(check_if_match("\"x\", " + read + " ", read)) == "");
  const auto after = changed(before, json::parse(R"({"models":{"split":null}})"));
  const auto late = check_if_match(read, etag_of(print_state(*after)));
  BOOST_TEST_REQUIRE(!late);
  BOOST_TEST((late.error().code == Code::outdated));
  BOOST_TEST(why(check_if_match("W/" + read, read)) != "");
}

BOOST_AUTO_TEST_CASE(a_name_means_one_version) {
  const DesiredState state = state_of(vectors("registry/changes.json").at("state"));
  const ModelState* scorer = model_named(state, "org/scorer");
  BOOST_REQUIRE(scorer == &state.models.at("scorer"));
  BOOST_TEST(*version_named(*scorer, "stable") == "3");
  BOOST_TEST(*version_named(*scorer, "4") == "4");
  BOOST_TEST((version_named(*scorer, "canary") == nullptr));
  BOOST_TEST((model_named(state, "nobody") == nullptr));
}

// What the owner has changed is the owner's; what people have changed stays.
BOOST_AUTO_TEST_CASE(an_owner_and_people) {
  const auto owner = [](const char* model) {
    return state_of({{"schema", "mctl.state/1"}, {"models", {{"m", json::parse(model)}}}});
  };
  const auto told = [&](const DesiredState& there, const char* before, const char* now) {
    return json::serialize(model_to_json(adopted(there, owner(before), owner(now)).models.at("m")));
  };
  const auto there = owner(R"({"versions":{"1":{"bundle":"a","settings":{"threads":3}},"2":{"bundle":"b"}},
    "labels":{"stable":"1","new":"2"},"traffic":{"stable":90,"new":10},"previous":"2","keep":2})");
  const char* first = R"({"versions":{"1":{"bundle":"a"},"2":{"bundle":"b"}},"labels":{"stable":"2"},"keep":1})";
  const std::string kept = json::serialize(model_to_json(there.models.at("m")));
  BOOST_TEST(told(there, first, first) == kept);
  BOOST_TEST(
      told(there, first, R"({"versions":{"1":{"bundle":"a"},"2":{"bundle":"b"}},"labels":{"stable":"2"},"keep":4})") ==
      R"({"versions":{"1":{"bundle":"a","settings":{"threads":3}},"2":{"bundle":"b"}},"labels":{"new":"2","stable":"1"},)"
      R"("traffic":{"new":10,"stable":90},"previous":"2","keep":4})");
  BOOST_TEST(
      told(there, first, R"({"versions":{"1":{"bundle":"c","settings":{"threads":5}}},"labels":{"stable":"1"}})") ==
      R"({"versions":{"1":{"bundle":"c","settings":{"threads":5}}},"labels":{"stable":"1"},"keep":2})");
  auto rolling = there;
  rolling.models.at("m").rollout = Rollout{.version = "2", .gates = {}, .from = "1", .reason = "", .evidence = {}};
  const auto gone = adopted(rolling, owner(first), owner(R"({"versions":{"1":{"bundle":"a"}}})"));
  BOOST_TEST((gone.models.at("m").rollout->phase == RolloutPhase::taken_back));
  BOOST_TEST(gone.models.at("m").rollout->reason == "version `2` is gone");
  BOOST_TEST(adopted(there, owner(first), {}).models.empty());
}

// Every setting that is a flag is read as the flag is.
BOOST_AUTO_TEST_CASE(settings_have_the_ranges_of_the_flags) {
  for (const std::string name :
       {"instances", "threads", "max_batch_size", "max_queue_delay_us", "max_queue_size", "default_timeout_ms",
        "latency_target_ms", "percentile", "max_request_rows", "worker_timeout"}) {
    std::string flag = "--" + name;
    std::ranges::replace(flag, '_', '-');
    for (const std::int64_t number :
         {-1l, 0l, 1l, 49l, 50l, 99l, 100l, 256l, 257l, 1024l, 1025l, 2147483647l, 2147483648l}) {
      std::string fault;
      settings_from_json({{name, number}}, "m", fault);
      const std::vector<std::string> words = {"b.pt2", flag, std::to_string(number)};
      BOOST_TEST(fault.empty() == static_cast<bool>(parse_serve_options(words)), flag + " " + std::to_string(number));
    }
  }
}

BOOST_AUTO_TEST_CASE(settings_of_the_nearest_layer) {
  std::string fault;
  const auto read = [&](const char* text) { return settings_from_json(json::parse(text), "m", fault); };
  const auto version = read(R"({"threads":1})"), model = read(R"({"threads":2,"instances":2})"),
             folder = read(R"({"instances":{"min":1,"max":3},"priority":"high"})"),
             flags = read(R"({"threads":8,"priority":"normal","percentile":95})");
  BOOST_TEST(fault == "");
  BOOST_TEST(json::serialize(settings_to_json(resolved({&version, &model, &folder, &flags}))) ==
             R"({"instances":2,"threads":1,"percentile":95,"priority":"high"})");
}

BOOST_AUTO_TEST_CASE(settings_over_flags) {
  std::string fault;
  const auto set = settings_from_json(
      json::parse(R"({"instances":{"min":2,"max":4},"threads":3,"max_batch_size":4,"max_queue_delay_us":5,
      "allowed_batch_sizes":[6],"max_queue_size":7,"default_timeout_ms":8,"latency_target_ms":9,"percentile":60,
      "max_request_rows":11,"worker_timeout":12,"start":"quick"})"),
      "m", fault);
  BOOST_TEST(fault == "");
  ModelSettings flags;
  flags.instances = 5;
  flags.threads = 6;
  const ModelSettings all = settings_with(flags, set), none = settings_with(flags, {});
  BOOST_TEST((all.instances == 2 && all.threads == 3 && all.max_batch_size == 4 && all.max_queue_delay_us == 5));
  BOOST_TEST((all.allowed_batch_sizes == std::vector<std::int64_t>{6} && all.max_queue_size == 7));
  BOOST_TEST((all.default_timeout_ms == 8 && all.latency_target_ms == 9 && all.percentile == 60));
  BOOST_TEST((all.max_request_rows == 11 && all.worker_timeout == 12 && all.start == Start::quick));
  BOOST_TEST((none.instances == 5 && none.threads == 6 && none.start == Start::full));
}

BOOST_AUTO_TEST_CASE(serve_toml_vectors) {
  const auto tests = vectors("registry/serve_toml.json");
  for (const auto& test : tests.as_array()) {
    BOOST_TEST_CONTEXT(text_in(test, "name")) {
      const auto settings = parse_serve_toml(joined(test.at("text")));
      BOOST_TEST(why(settings) == text_in(test, "error"));
      if (settings) BOOST_TEST(json::value(settings_to_json(*settings)) == test.at("settings"));
    }
  }
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace mctl
