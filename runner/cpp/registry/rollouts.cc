#include "registry/rollouts.h"

#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

namespace mctl {
namespace {

using namespace std::chrono_literals;

constexpr auto kBetweenLooks = 200ms;  // a gate that fails takes all traffic back within a second
constexpr std::string_view kBy = "rollout";

struct Ended {
  std::int64_t requests = 0, errors = 0;
};

// Requests that a version answered, or should have.
Ended ended_by(const Metrics& metrics) {
  const auto count = [&](Outcome outcome) {
    return static_cast<std::int64_t>(metrics.requests[static_cast<std::size_t>(outcome)]);
  };
  const std::int64_t errors = count(Outcome::error) + count(Outcome::expired);
  return {count(Outcome::ok) + errors, errors};
}

void add(VersionCounts& to, const VersionCounts& more) {
  to.requests += more.requests;
  to.errors += more.errors;
  for (const auto& [bucket, latencies] : more.compute) to.compute[bucket].add(latencies);
}

}  // namespace

void Rollouts::begin() {
  for (const auto& [name, model] : std::map(fleet_.desired().models))
    if (const auto patch = resumption(name, model)) fleet_.change_by_server(*patch, kBy);
  tick();
}

std::string Rollouts::told(const std::string& model) const {
  const auto progress = progress_.find(model);
  return progress != progress_.end() ? progress->second.text : "";
}

void Rollouts::tick() {
  const std::int64_t now_ms = now_ns() / 1'000'000;
  std::vector<std::pair<std::string, ModelState>> running;
  for (const auto& [name, model] : fleet_.desired().models)
    if (model.rolls()) running.emplace_back(name, model);
  std::erase_if(progress_, [&](const auto& progress) {
    const auto model = fleet_.desired().models.find(progress.first);
    return model == fleet_.desired().models.end() || !model->second.rolls();
  });
  for (const auto& [name, model] : running) look(name, model, now_ms);
  timer_.expires_after(kBetweenLooks);
  timer_.async_wait(guard_([this](boost::system::error_code ec) {
    if (!ec) tick();
  }));
}

void Rollouts::look(const std::string& name, const ModelState& model, std::int64_t now_ms) {
  const Rollout& rollout = *model.rollout;
  Progress& progress = progress_[name];
  const bool same = progress.version == rollout.version && progress.phase == rollout.phase &&
                    progress.step == rollout.step && progress.began_ms > 0;
  if (!same) begin_step(progress, name, rollout, now_ms);
  follow(progress.fresh, name, rollout.version);
  follow(progress.old, name, rollout.from);
  decide(name, rollout, judge(rollout, watched(progress, name, rollout, now_ms)), progress);
}

void Rollouts::begin_step(Progress& progress, const std::string& name, const Rollout& rollout, std::int64_t now_ms) {
  const bool goes_on = progress.version == rollout.version && progress.phase == RolloutPhase::step;
  VersionCounts before = goes_on ? counted(progress.old) : VersionCounts{};
  if (progress.version != rollout.version) {
    const auto fresh = fleet_.models().find(name, rollout.version);
    const Shadowed shadowed = fresh ? (*fresh)->metrics().shadowed : Shadowed{};
    progress.compared = static_cast<std::int64_t>(shadowed.compared);
    progress.differed = static_cast<std::int64_t>(shadowed.differed);
  }
  progress.version = rollout.version;
  progress.phase = rollout.phase;
  progress.step = rollout.step;
  progress.began_ms = now_ms;
  progress.fresh = progress.old = {};
  progress.old_before = std::move(before);
  for (const std::string& version : {rollout.version, rollout.from})
    if (const auto model = fleet_.models().find(name, version)) (*model)->metrics().judged.emplace();
}

// The version as it is in memory now.
void Rollouts::follow(Counter& counter, const std::string& name, const std::string& version) {
  const auto found = fleet_.models().find(name, version);
  if (!found || counter.model.lock().get() == *found) return;
  add(counter.gone, counted(counter));
  Metrics& metrics = (*found)->metrics();
  if (!metrics.judged) metrics.judged.emplace();
  const Ended ended = ended_by(metrics);
  counter.model = (*found)->weak_from_this();
  counter.requests = ended.requests;
  counter.errors = ended.errors;
}

VersionCounts Rollouts::counted(const Counter& counter) {
  VersionCounts counts = counter.gone;
  const auto model = counter.model.lock();
  if (!model) return counts;
  const Ended ended = ended_by(model->metrics());
  add(counts, {ended.requests - counter.requests, ended.errors - counter.errors,
               model->metrics().judged.value_or(LatenciesByBucket())});
  return counts;
}

Watched Rollouts::watched(const Progress& progress, const std::string& name, const Rollout& rollout,
                          std::int64_t now_ms) const {
  Watched watched;
  const auto found = fleet_.models().find(name, rollout.version);
  watched.can_answer = found && (*found)->ready();
  for (const auto& held : fleet_.held())
    if (held->as.model == name && held->as.version == rollout.version && !held->model)
      watched.failed = held->failure.text;
  watched.fresh = counted(progress.fresh);
  if (found) {
    const Shadowed& shadowed = (*found)->metrics().shadowed;
    watched.compared = std::max<std::int64_t>(0, static_cast<std::int64_t>(shadowed.compared) - progress.compared);
    watched.differed = std::max<std::int64_t>(0, static_cast<std::int64_t>(shadowed.differed) - progress.differed);
    watched.worst = shadowed.ids;
  }
  const bool all = rollout.phase == RolloutPhase::step && rollout.steps[static_cast<std::size_t>(rollout.step)] == 100;
  watched.old = all ? progress.old_before : counted(progress.old);
  watched.held_ms = now_ms - progress.began_ms;
  return watched;
}

void Rollouts::decide(const std::string& name, const Rollout& rollout, const RolloutVerdict& verdict,
                      Progress& progress) {
  progress.text = verdict.text;
  const auto patch = patch_of(name, rollout, verdict);
  if (!patch) return;
  const bool back = verdict.move == Move::take_back, done = verdict.move == Move::promote;
  fleet_.events().tell("rollout", {{"model", name},
                                   {"version", rollout.version},
                                   {"did", back   ? "taken back"
                                           : done ? "promoted"
                                                  : "went on"},
                                   {"why", verdict.text}});
  fleet_.change_by_server(*patch, kBy);
}

}  // namespace mctl
