// The steps from what is in memory to what is desired: vectors, and a server played at random.
#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <random>

#include "registry/change.h"
#include "registry/reconcile.h"
#include "registry/traffic.h"
#include "support.h"

namespace mctl {
namespace {

namespace json = boost::json;
using Kind = Step::Kind;

ModelVersion named(std::string_view text) {
  const std::size_t slash = text.find('/');
  return {std::string(text.substr(0, slash)), std::string(text.substr(slash + 1))};
}

DesiredState state_of(const json::value& models) {
  const auto state = parse_state(json::serialize(json::value{{"schema", "mctl.state/1"}, {"models", models}}));
  BOOST_REQUIRE_MESSAGE(state, why(state));
  return *state;
}

SettingsOf settings_in(const DesiredState& state) {
  return [&state](const std::string& model, const std::string& version) {
    const ModelState& its = state.models.at(model);
    return resolved({&its.versions.at(version).settings, &its.settings});
  };
}

std::string text_of(const Step& step) {
  constexpr std::string_view names[] = {"load", "switch_over", "drain", "unload", "wait", "refuse"};
  return std::string(names[static_cast<std::size_t>(step.kind)]) + ' ' + step.model + '/' + step.version +
         (step.resident > 0 ? " #" + std::to_string(step.resident) : "") + ": " + step.why;
}

std::int64_t number_in(const json::object& object, std::string_view name, std::int64_t otherwise = 0) {
  const auto* value = object.if_contains(name);
  return value != nullptr ? value->as_int64() : otherwise;
}

Resident resident_in(const json::object& object, std::uint64_t id) {
  const std::string phase(object.at("phase").as_string());
  const auto is = [&](std::string_view name) { return object.contains(name) && object.at(name).as_bool(); };
  const auto [model, version] = named(object.at("is").as_string());
  return {.id = id,
          .model = model,
          .version = version,
          .bundle = std::string(object.at("bundle").as_string()),
          .digest = object.contains("digest") ? std::string(object.at("digest").as_string()) : "",
          .settings = {},
          .phase = phase == "loading"    ? ResidentPhase::loading
                   : phase == "ready"    ? ResidentPhase::ready
                   : phase == "draining" ? ResidentPhase::draining
                                         : ResidentPhase::failed,
          .serving = is("serving"),
          .routed = is("routed"),
          .calls = number_in(object, "calls"),
          .bytes = number_in(object, "bytes"),
          .used_ms = number_in(object, "used_ms")};
}

Actual actual_in(const json::object& test) {
  Actual actual;
  for (const auto& item : test.at("residents").as_array())
    actual.residents.push_back(resident_in(item.as_object(), actual.residents.size() + 1));
  if (const auto* asked = test.if_contains("asked"))
    for (const auto& name : asked->as_array()) actual.asked.insert(named(name.as_string()));
  if (const auto* needs = test.if_contains("needs"))
    for (const auto& [bundle, bytes] : needs->as_object()) actual.needs[bundle] = bytes.as_int64();
  if (test.contains("free_bytes")) actual.free_bytes = test.at("free_bytes").as_int64();
  if (test.contains("max_resident")) actual.max_resident = test.at("max_resident").as_int64();
  actual.loads_at_once = number_in(test, "loads_at_once", 1);
  actual.now_ms = number_in(test, "now_ms");
  return actual;
}

// --- a server that takes the steps ---------------------------------------------------------------------------------

constexpr std::int64_t kMegabyte = 1 << 20, kMemory = 600 * kMegabyte, kMostResident = 6;

class Played {
 public:
  explicit Played(unsigned seed) : random_(seed) {
    actual_.loads_at_once = 2;
    actual_.max_resident = kMostResident;
  }

  void change() {
    const std::string model(1, static_cast<char>('a' + below(4))), version = std::to_string(1 + below(4));
    json::object patch;
    switch (below(9)) {
      case 0:
      case 1:
      case 2:  // a bundle; those of `x` cannot be loaded
        patch["versions"] = {{version, {{"bundle", std::string(1, "pqrstx"[below(6)])}}}};
        break;
      case 3:
        patch["traffic"] = {{version, 100}};
        break;
      case 4:
        patch["traffic"] = nullptr;
        break;
      case 5:
        patch["settings"] = {{"load", below(2) == 0 ? "on_demand" : "start"}, {"idle_unload_s", 1 + below(20)}};
        break;
      case 6:
        patch["labels"] = {{"stable", version}};
        break;
      case 7:
        patch["keep"] = below(3);
        break;
      default:
        patch["versions"] = {{version, nullptr}};
        break;
    }
    if (auto after = changed(desired_, {{"models", {{model, below(40) == 0 ? json::value() : json::value(patch)}}}}))
      desired_ = *std::move(after);
    BOOST_TEST((*parse_state(print_state(desired_)) == desired_));
    for (auto& [name, shares] : shares_)  // what answered is gone, by somebody's word
      std::erase_if(shares, [&](const Share& share) {
        return !desired_.models.contains(name) || !desired_.models.at(name).versions.contains(share.version);
      });
  }

  void live() {
    actual_.now_ms += below(3000);
    for (Resident& one : actual_.residents) {
      if (one.phase == ResidentPhase::loading && below(3) == 0)
        one.phase = one.bundle == "x" ? ResidentPhase::failed : ResidentPhase::ready;
      if (one.phase == ResidentPhase::failed) one.bytes = 0;
      if (one.calls > 0 && below(2) == 0) --one.calls;
    }
    for (const auto& [name, shares] : shares_)
      if (!shares.empty() && below(2) == 0)
        ask(name, shares[static_cast<std::size_t>(below(static_cast<std::int64_t>(shares.size())))].version);
  }

  void settle() {
    for (int round = 0; round < 3; ++round) take(steps());
  }

  // No more changes and no more requests: everything that can be is as it should be.
  void finish() {
    for (int round = 0; round < 200; ++round) {
      for (Resident& one : actual_.residents) {
        one.calls = 0;
        if (one.phase == ResidentPhase::loading)
          one.phase = one.bundle == "x" ? ResidentPhase::failed : ResidentPhase::ready;
        if (one.phase == ResidentPhase::failed) one.bytes = 0;
      }
      take(steps());
    }
    std::set<ModelVersion> refused;
    for (const Step& step : steps()) {
      BOOST_TEST((step.kind == Kind::refuse || step.kind == Kind::wait), text_of(step));
      refused.emplace(step.model, step.version);
    }
    for (const auto& [name, model] : desired_.models)
      for (const std::string& version : needed_versions(model, [](const auto&) { return false; }).used)
        if (settings_in(desired_)(name, version).load != LoadWhen::on_demand && !refused.contains({name, version}))
          BOOST_TEST((find(name, version, ResidentPhase::ready) || find(name, version, ResidentPhase::failed)),
                     name + '/' + version);
  }

  std::int64_t loads = 0, switches = 0, drains = 0, evictions = 0;

 private:
  std::int64_t below(std::int64_t end) { return std::uniform_int_distribution<std::int64_t>(0, end - 1)(random_); }

  Resident* find(const std::string& model, const std::string& version, ResidentPhase phase) {
    const auto found = std::ranges::find_if(actual_.residents, [&](const Resident& one) {
      return one.model == model && one.version == version && one.phase == phase;
    });
    return found != actual_.residents.end() ? &*found : nullptr;
  }

  Resident* serving(const std::string& model, const std::string& version) {
    for (Resident& one : actual_.residents)
      if (one.model == model && one.version == version && one.serving) return &one;
    return nullptr;
  }

  void ask(const std::string& model, const std::string& version) {
    if (Resident* one = serving(model, version)) {
      ++one->calls;
      one->used_ms = actual_.now_ms;
      actual_.asked.erase({model, version});
    } else {
      actual_.asked.insert({model, version});
    }
  }

  std::int64_t taken() const {
    std::int64_t bytes = 0;
    for (const Resident& one : actual_.residents) bytes += one.bytes;
    return bytes;
  }

  std::vector<Step> steps() {
    actual_.free_bytes = kMemory - taken();
    for (const char bundle : std::string("pqrstx"))
      actual_.needs[std::string(1, bundle)] = (bundle - 'o') * 40 * kMegabyte;
    std::erase_if(actual_.asked, [&](const ModelVersion& one) {
      return !desired_.models.contains(one.first) || !desired_.models.at(one.first).versions.contains(one.second);
    });
    return next_steps(desired_, actual_, settings_in(desired_));
  }

  void take(const std::vector<Step>& steps) {
    for (const Step& step : steps) take(step);
    route();
  }

  void take(const Step& step) {
    const auto resident = std::ranges::find(actual_.residents, step.resident, &Resident::id);
    BOOST_REQUIRE((step.resident == 0) == (resident == actual_.residents.end()));
    if (step.kind == Kind::load) {
      const VersionState& state = desired_.models.at(step.model).versions.at(step.version);
      actual_.residents.push_back({.id = ++last_id_,
                                   .model = step.model,
                                   .version = step.version,
                                   .bundle = state.bundle,
                                   .digest = "",
                                   .settings = settings_in(desired_)(step.model, step.version),
                                   .bytes = actual_.needs.at(state.bundle),
                                   .used_ms = actual_.now_ms});
      ++loads;
      const auto count = std::ranges::count_if(actual_.residents,
                                               [](const Resident& one) { return one.phase != ResidentPhase::failed; });
      BOOST_TEST(count <= kMostResident);
      BOOST_TEST(taken() <= kMemory);
    } else if (step.kind == Kind::switch_over) {
      BOOST_TEST((resident->phase == ResidentPhase::ready));
      for (Resident& one : actual_.residents)
        if (one.model == step.model && one.version == step.version) one.serving = false;
      resident->serving = true;
      actual_.asked.erase({step.model, step.version});
      ++switches;
    } else if (step.kind == Kind::drain || step.kind == Kind::unload) {
      const bool there =
          desired_.models.contains(step.model) && desired_.models.at(step.model).versions.contains(step.version);
      const bool on_demand = there && settings_in(desired_)(step.model, step.version).load == LoadWhen::on_demand;
      BOOST_TEST((!resident->serving || !resident->routed || !there || on_demand), text_of(step));
      if (step.kind == Kind::drain) {
        resident->phase = ResidentPhase::draining;
        resident->serving = false;
        ++drains;
      } else {
        BOOST_TEST(resident->calls == 0);
        evictions += step.why.ends_with("longest ago");
        actual_.residents.erase(resident);
      }
    }
  }

  // What the router does after each step: shares as they are now. A model that could answer still can.
  void route() {
    for (const auto& [name, model] : desired_.models) {
      const auto can_answer = [&](const std::string& version) {
        return serving(name, version) != nullptr || (settings_in(desired_)(name, version).load == LoadWhen::on_demand &&
                                                     find(name, version, ResidentPhase::failed) == nullptr);
      };
      std::vector<Share>& shares = shares_[name];
      const bool answered =
          std::ranges::any_of(shares, [&](const Share& share) { return answering_.contains({name, share.version}); });
      shares = shares_of(model, can_answer, shares);
      if (answered) BOOST_TEST(!shares.empty(), name);
    }
    answering_.clear();
    for (Resident& one : actual_.residents) {
      const auto& shares = shares_[one.model];
      one.routed = one.serving && desired_.models.contains(one.model) &&
                   std::ranges::find(shares, one.version, &Share::version) != shares.end();
      if (one.routed) answering_.insert({one.model, one.version});
    }
  }

  std::mt19937 random_;
  DesiredState desired_;
  Actual actual_;
  std::map<std::string, std::vector<Share>> shares_;
  std::set<ModelVersion> answering_;  // in memory, and requests go there
  std::uint64_t last_id_ = 0;
};

BOOST_AUTO_TEST_SUITE(registry_reconcile)

BOOST_AUTO_TEST_CASE(step_vectors) {
  const auto tests = vectors("registry/reconcile.json");
  for (const auto& item : tests.as_array()) {
    const auto& test = item.as_object();
    BOOST_TEST_CONTEXT(test.at("name")) {
      const DesiredState desired = state_of(test.at("models"));
      std::vector<std::string> steps, expected = json::value_to<std::vector<std::string>>(test.at("steps"));
      for (const Step& step : next_steps(
               desired,
               [&] {
                 Actual actual = actual_in(test);  // as they were loaded: with the settings of now, but for what is new
                 for (Resident& one : actual.residents)
                   if (desired.models.contains(one.model))
                     one.settings.load = desired.models.at(one.model).settings.load;
                 return actual;
               }(),
               settings_in(desired)))
        steps.push_back(text_of(step));
      BOOST_TEST(steps == expected, boost::test_tools::per_element());
    }
  }
}

BOOST_AUTO_TEST_CASE(no_model_loses_a_request_whatever_happens) {
  std::int64_t loads = 0, switches = 0, drains = 0, evictions = 0;
  for (unsigned seed = 0; seed < 30; ++seed) {
    BOOST_TEST_CONTEXT("seed " << seed) {
      Played server(seed);
      for (int round = 0; round < 120; ++round) {
        if (round % 3 == 0) server.change();
        server.live();
        server.settle();
      }
      server.finish();
      loads += server.loads;
      switches += server.switches;
      drains += server.drains;
      evictions += server.evictions;
    }
  }
  BOOST_TEST((loads > 200 && switches > 150 && drains > 20 && evictions > 5),
             loads << ' ' << switches << ' ' << drains << ' ' << evictions);
}

BOOST_AUTO_TEST_CASE(instances_follow_the_load) {
  const InstanceRange range{1, 4};
  BOOST_TEST(instances_for(range, {.instances = 2}) == 2);
  BOOST_TEST(instances_for(range, {.instances = 2, .waiting_ms = kCrowdedMs, .free_cores = 1}) == 3);
  BOOST_TEST(instances_for(range, {.instances = 2, .waiting_ms = kCrowdedMs - 1, .free_cores = 1}) == 2);
  BOOST_TEST(instances_for(range, {.instances = 2, .waiting_ms = kCrowdedMs, .free_cores = 0}) == 2);
  BOOST_TEST(instances_for(range, {.instances = 4, .waiting_ms = kCrowdedMs, .free_cores = 1}) == 4);
  BOOST_TEST(instances_for(range, {.instances = 2, .spare_ms = kQuietMs}) == 1);
  BOOST_TEST(instances_for(range, {.instances = 1, .spare_ms = kQuietMs}) == 1);
  BOOST_TEST(instances_for({2, 2}, {.instances = 1}) == 2);
  BOOST_TEST(instances_for({1, 2}, {.instances = 3}) == 2);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace mctl
