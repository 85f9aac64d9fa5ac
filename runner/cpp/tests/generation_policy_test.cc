// The rules of generation_policy.cc by the vectors that Python runs too, and over random schedules.
#include "engine/generation_policy.h"

#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <random>
#include <set>

#include "tests/support.h"

namespace mctl {
namespace {

namespace json = boost::json;

std::int64_t number(const json::object& of, std::string_view name, std::int64_t otherwise) {
  const auto* value = of.if_contains(name);
  return value != nullptr ? value->to_number<std::int64_t>() : otherwise;
}

GenerationPolicy::Settings settings_of(const json::object& given) {
  GenerationPolicy::Settings settings;
  settings.blocks = number(given, "blocks", 0);
  settings.context = number(given, "context", 0);
  settings.step_tokens = number(given, "step_tokens", settings.step_tokens);
  settings.budget = number(given, "budget", settings.budget);
  settings.sequences = number(given, "sequences", settings.sequences);
  settings.watermark = number(given, "watermark", settings.watermark);
  if (const auto* evict = given.if_contains("evict")) settings.evict = evict->as_bool();
  return settings;
}

// `[first, count]`: consecutive tokens.
std::vector<TokenId> range_of(const json::array& given) {
  std::vector<TokenId> tokens(given[1].to_number<std::size_t>());
  std::iota(tokens.begin(), tokens.end(), given[0].to_number<TokenId>());
  return tokens;
}

void submit(GenerationPolicy& policy, const json::object& event) {
  Sequence sequence;
  sequence.id = event.at("id").to_number<SequenceId>();
  sequence.tokens = range_of(event.at("tokens").as_array());
  sequence.most = number(event, "most", 0);
  sequence.client = static_cast<Client>(number(event, "client", 0));
  sequence.salt = static_cast<std::uint64_t>(number(event, "salt", 0));
  if (const auto* after = event.if_contains("after")) sequence.after = after->to_number<SequenceId>();
  policy.submit(std::move(sequence));
}

json::array ids_of(const std::vector<SequenceId>& ids) {
  json::array list;
  for (const SequenceId id : ids) list.push_back(id);
  return list;
}

json::value started(GenerationPolicy& policy) {
  const PlannedStep* const step = policy.next_step();
  if (step == nullptr) return nullptr;
  json::array parts;
  for (const PlannedPart& part : step->parts) parts.push_back({part.id, part.start, part.count});
  return {{"parts", parts}, {"admitted", ids_of(step->admitted)}, {"preempted", ids_of(step->preempted)}};
}

// A token is its own position.
void end(GenerationPolicy& policy) {
  std::unordered_map<SequenceId, TokenId> tokens;
  for (const PlannedPart& part : policy.step()->parts)
    if (part.wanted) tokens[part.id] = static_cast<TokenId>(part.start + part.count);
  policy.stepped(tokens);
}

json::array run(const json::object& one) {
  GenerationPolicy policy(settings_of(one.at("settings").as_object()));
  json::array told;
  for (const json::value& value : one.at("events").as_array()) {
    const json::object& event = value.as_object();
    const std::string_view what = event.at("do").as_string();
    const auto id = static_cast<SequenceId>(number(event, "id", 0));
    if (what == "submit") submit(policy, event);
    if (what == "remove") policy.remove(id);
    if (what == "pause" || what == "resume") policy.pause(id, what == "pause");
    if (what == "available") told.push_back(policy.blocks().available());
    if (what == "step" || what == "start") told.push_back(started(policy));
    if (what == "end" || (what == "step" && policy.step() != nullptr)) end(policy);
    if (what != "die") continue;
    const auto guilty = policy.died();
    told.push_back(guilty ? json::value(*guilty) : json::value(nullptr));
  }
  return told;
}

// The same numbers, whether they were written as signed or not.
std::string text_of(const json::value& value) { return json::serialize(value); }

BOOST_AUTO_TEST_CASE(vectors_of_the_policy) {
  const json::value cases = vectors("generation/policy.json");
  for (const json::value& one : cases.as_array()) {
    BOOST_TEST_CONTEXT(one.at("name").as_string().c_str()) {
      const json::array gave = run(one.as_object()), wanted = one.at("gives").as_array();
      BOOST_TEST_REQUIRE(gave.size() == wanted.size());
      for (std::size_t i = 0; i < gave.size(); ++i) BOOST_TEST(text_of(gave[i]) == text_of(wanted[i]));
    }
  }
}

BOOST_AUTO_TEST_CASE(what_never_fits_is_told_with_both_numbers) {
  GenerationPolicy policy({.blocks = 3, .context = 64});
  BOOST_TEST(policy.never_fits(40, 8).empty());
  BOOST_TEST(policy.never_fits(40, 9) == "40 tokens and 9 new ones need 4 blocks of 16, there are 3");
}

// --- random schedules: 1,000 sequences, of which some are cancelled, in caches that are too small
// ---------------------

constexpr std::int64_t kFew = 24;  // blocks

TokenId next_token(std::span<const TokenId> tokens) {
  std::int64_t sum = 0;
  for (std::size_t i = 0; i < tokens.size(); ++i) sum += static_cast<std::int64_t>(i + 1) * tokens[i];
  return static_cast<TokenId>(sum % 5);
}

// Blocks as a model sees them: what was written where. A step reads all that its sequences have before it.
class Caches {
 public:
  std::unordered_map<SequenceId, TokenId> compute(const GenerationPolicy& policy) {
    std::unordered_map<SequenceId, TokenId> made;
    for (const PlannedPart& part : policy.step()->parts) {
      const Sequence& sequence = policy.planned(part);
      for (std::int64_t at = part.start; at < part.start + part.count; ++at) slot(sequence, at) = wanted(sequence, at);
      bool same = true;
      for (std::int64_t at = 0; at < part.start + part.count; ++at)
        same = same && slot(sequence, at) == wanted(sequence, at);
      BOOST_TEST_REQUIRE(same);
      if (part.wanted) made[part.id] = next_token(sequence.tokens);
    }
    return made;
  }

 private:
  using Slot = std::tuple<std::uint64_t, TokenId, std::int64_t>;
  static Slot wanted(const Sequence& sequence, std::int64_t at) {
    return {sequence.salt, sequence.tokens[static_cast<std::size_t>(at)], at};
  }
  Slot& slot(const Sequence& sequence, std::int64_t at) {
    return slots_.at(
        static_cast<std::size_t>(sequence.blocks.at(static_cast<std::size_t>(at / kBlock)) * kBlock + at % kBlock));
  }
  std::vector<Slot> slots_ = std::vector<Slot>(kFew * kBlock, Slot(99, -1, -1));
};

struct Random {
  std::mt19937 engine;
  std::size_t below(std::size_t count) { return engine() % count; }
  bool chance(int percent) { return below(100) < static_cast<std::size_t>(percent); }
  template <class Map>
  auto any_of(const Map& map) {
    return std::next(map.begin(), static_cast<std::ptrdiff_t>(below(map.size())))->first;
  }
};

struct Tally {
  int ended = 0, cancelled = 0;
};

class Schedule {
 public:
  Schedule(bool evict, unsigned seed)
      : policy_({.blocks = kFew,
                 .context = 200,
                 .step_tokens = 40,
                 .budget = 20,
                 .sequences = 12,
                 .watermark = 1,
                 .evict = evict}),
        random_{std::mt19937(seed)} {}

  Tally run() {
    while (next_ < 1000 || !prompts_.empty()) {
      if (next_ < 1000 && random_.chance(60)) submit();
      if (!prompts_.empty() && random_.chance(10)) policy_.pause(random_.any_of(prompts_), true);
      for (const auto& [id, prompt] : prompts_)
        if (random_.chance(30)) policy_.pause(id, false);
      const bool runs = policy_.next_step() != nullptr;
      if (!prompts_.empty() && random_.chance(20)) cancel();
      if (runs) finish_step();
    }
    return tally_;
  }

  const GenerationPolicy& policy() const { return policy_; }

 private:
  void submit() {
    constexpr std::size_t lengths[] = {0, 16, 40, 64};
    std::vector<TokenId> prompt;
    const std::size_t text = random_.below(3), length = lengths[random_.below(4)];
    for (std::size_t at = 0; at < length; ++at) prompt.push_back(static_cast<TokenId>(at * at / 3 % (5 + text)));
    prompt.push_back(static_cast<TokenId>(random_.below(2)));
    Sequence sequence{.id = next_, .tokens = prompt, .most = 1 + static_cast<std::int64_t>(random_.below(39))};
    sequence.client = random_.below(3);
    sequence.salt = random_.below(2);
    if (!prompts_.empty() && random_.chance(20)) sequence.after = random_.any_of(prompts_);
    BOOST_TEST_REQUIRE(policy_.never_fits(static_cast<std::int64_t>(prompt.size()), sequence.most).empty());
    policy_.submit(std::move(sequence));
    prompts_[next_++] = std::move(prompt);
  }

  void cancel() {
    const SequenceId gone = random_.any_of(prompts_);
    policy_.remove(gone);
    prompts_.erase(gone);
    ++tally_.cancelled;
  }

  void finish_step() {
    if (random_.chance(2)) {
      if (const auto guilty = policy_.died()) prompts_.erase(*guilty);
      caches_ = {};
      return;
    }
    policy_.stepped(caches_.compute(policy_));
    for (auto at = prompts_.begin(); at != prompts_.end();) {
      const Sequence& sequence = policy_.sequence(at->first);
      if (sequence.length() - sequence.prompt < sequence.most) {
        ++at;
        continue;
      }
      std::vector<TokenId> wanted = at->second;
      for (std::int64_t i = 0; i < sequence.most; ++i) wanted.push_back(next_token(wanted));
      BOOST_TEST_REQUIRE((sequence.tokens == wanted));
      policy_.remove(at->first);
      at = prompts_.erase(at);
      ++tally_.ended;
    }
  }

  GenerationPolicy policy_;
  Random random_;
  Caches caches_;
  std::map<SequenceId, std::vector<TokenId>> prompts_;  // of those that nobody removed
  SequenceId next_ = 0;
  Tally tally_;
};

BOOST_AUTO_TEST_CASE(random_schedules_lose_no_block_and_change_no_token) {
  for (const bool evict : {true, false}) {
    Schedule schedule(evict, 7);
    const Tally tally = schedule.run();
    const GenerationPolicy& policy = schedule.policy();
    BOOST_TEST(policy.running() == 0u);
    BOOST_TEST(policy.waiting() == 0u);
    BOOST_TEST(policy.blocks().available() == kFew);
    BOOST_TEST(tally.ended > 200);
    BOOST_TEST(tally.cancelled > 200);
    BOOST_TEST(policy.counts().found_tokens > 200u);
    BOOST_TEST((policy.counts().preemptions > 30) == evict);
  }
}

}  // namespace
}  // namespace mctl
