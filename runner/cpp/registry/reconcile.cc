#include "registry/reconcile.h"

#include <algorithm>
#include <span>

#include "registry/traffic.h"

namespace mctl {
namespace {

using Kind = Step::Kind;

constexpr std::int64_t kIdleUnloadS = 300;

// A version that is to be in memory, or may be when it is asked for.
struct Goal {
  std::string model, version;
  const VersionState* state = nullptr;
  SettingsLayer settings;
  bool used = false, asked = false;

  bool on_demand() const { return settings.load == LoadWhen::on_demand; }
  bool now() const { return asked || !on_demand(); }
};

// What can be changed without loading anew counts as the same.
SettingsLayer loaded_part(SettingsLayer settings) {
  const std::int64_t instances = settings.instances.value_or(InstanceRange{}).min;
  settings.instances = InstanceRange{instances, instances};
  settings.load.reset();
  settings.idle_unload_s.reset();
  settings.priority.reset();
  settings.start.reset();
  return settings;
}

bool same_content(const Resident& resident, const VersionState& state) {
  const bool same_bytes = resident.digest.empty() || state.digest.empty() || resident.digest == state.digest;
  return resident.bundle == state.bundle && same_bytes;
}

bool fulfils(const Resident& resident, const Goal& goal) {
  return resident.model == goal.model && resident.version == goal.version && same_content(resident, *goal.state) &&
         loaded_part(resident.settings) == loaded_part(goal.settings);
}

bool in_memory(const Resident& resident) { return resident.phase != ResidentPhase::failed; }

std::string mebibytes(std::int64_t bytes) { return std::to_string((bytes + (1 << 20) - 1) >> 20) + " MiB"; }

const ModelVersion& key_of(const ModelVersion& key) { return key; }
template <class T>
const ModelVersion& key_of(const std::pair<const ModelVersion, T>& item) {
  return item.first;
}

class Reconciler {
 public:
  Reconciler(const DesiredState& desired, const Actual& actual, const SettingsOf& settings_of)
      : actual_(actual), settings_of_(settings_of) {
    for (const Resident& resident : actual.residents)
      by_version_[{resident.model, resident.version}].push_back(&resident);
    for (const auto& [name, model] : desired.models) add_goals(name, model);
    if (actual.free_bytes) free_ = *actual.free_bytes;
    for (const Resident& resident : actual.residents) {
      resident_count_ += in_memory(resident);
      loading_ += resident.phase == ResidentPhase::loading;
      // What it will take, and has not taken yet.
      if (resident.phase == ResidentPhase::loading)
        free_ -= std::max<std::int64_t>(0, need_of(resident.bundle) - resident.bytes);
    }
  }

  std::vector<Step> steps() {
    for (const auto& [name, goal] : goals_) switch_over(goal);
    for (const Resident& resident : actual_.residents) let_go(resident);
    std::vector<const Goal*> order;
    for (const auto& [name, goal] : goals_)
      if (goal.now()) order.push_back(&goal);
    std::ranges::stable_sort(order, std::greater(), [](const Goal* goal) { return 2 * goal->asked + goal->used; });
    for (const Goal* goal : order) load(*goal);
    return std::move(steps_);
  }

 private:
  const std::vector<const Resident*>& residents_of(const std::string& model, const std::string& version) const {
    static const std::vector<const Resident*> none;
    const auto found = by_version_.find({model, version});
    return found != by_version_.end() ? found->second : none;
  }

  void add_goals(const std::string& name, const ModelState& model) {
    const auto goal_of = [&](const std::string& version, bool used) {
      return Goal{name,
                  version,
                  &model.versions.at(version),
                  settings_of_(name, version),
                  used,
                  actual_.asked.contains({name, version})};
    };
    const Needed needed = needed_versions(model, [&](const std::string& version) {
      const auto failed = [&](const Resident* one) {
        return one->phase == ResidentPhase::failed && fulfils(*one, goal_of(version, false));
      };
      return std::ranges::any_of(residents_of(name, version), failed);
    });
    for (const std::string& version : needed.used) goals_.try_emplace({name, version}, goal_of(version, true));
    for (const std::string& version : needed.kept) goals_.try_emplace({name, version}, goal_of(version, false));
    // On demand, an older version is in memory, or asked for, too.
    const auto add_others = [&](const auto& named) {
      for (auto one = named.lower_bound({name, ""}); one != named.end() && key_of(*one).first == name; ++one) {
        const std::string& version = key_of(*one).second;
        if (!model.versions.contains(version)) continue;
        if (Goal goal = goal_of(version, false); goal.on_demand()) goals_.try_emplace(key_of(*one), std::move(goal));
      }
    };
    add_others(actual_.asked);
    add_others(by_version_);
  }

  const Goal* goal_named(const std::string& model, const std::string& version) const {
    const auto found = goals_.find({model, version});
    return found != goals_.end() ? &found->second : nullptr;
  }

  std::int64_t need_of(const std::string& bundle) const {
    const auto need = actual_.needs.find(bundle);
    return need != actual_.needs.end() ? need->second : 0;
  }

  // Rule 4: the new one of a version is ready.
  void switch_over(const Goal& goal) {
    for (const Resident* resident : residents_of(goal.model, goal.version))
      if (resident->phase == ResidentPhase::ready && !resident->serving && fulfils(*resident, goal))
        add(Kind::switch_over, *resident, "it is ready");
  }

  void let_go(const Resident& resident) {
    if (resident.phase == ResidentPhase::draining) {
      if (resident.calls == 0) add(Kind::unload, resident, "its last call was answered");
      return;
    }
    const Goal* goal = goal_named(resident.model, resident.version);
    if (goal != nullptr && fulfils(resident, *goal)) return let_idle_go(resident, *goal);
    if (resident.phase != ResidentPhase::ready)
      return add(Kind::unload, resident, goal != nullptr ? "its bundle or settings have changed" : "it is not used");
    const bool replaced = goal != nullptr && replacement_serves(*goal);
    if (goal != nullptr && !replaced && goal->now() && resident.serving) return;
    if (goal == nullptr && resident.routed) return;  // rule 5
    drain(resident, replaced          ? "another took its place"
                    : goal != nullptr ? "its bundle or settings have changed"
                                      : "it is not used");
  }

  bool replacement_serves(const Goal& goal) const {
    return std::ranges::any_of(residents_of(goal.model, goal.version), [&](const Resident* one) {
      return one->phase == ResidentPhase::ready && one->serving && fulfils(*one, goal);
    });
  }

  void let_idle_go(const Resident& resident, const Goal& goal) {
    if (resident.phase != ResidentPhase::ready || !can_go(resident, goal)) return;
    const std::int64_t idle_s = goal.settings.idle_unload_s.value_or(kIdleUnloadS);
    if (actual_.now_ms - resident.used_ms >= idle_s * 1000)
      add(Kind::unload, resident, "nobody asked for it for " + std::to_string(idle_s) + " s");
  }

  // On demand, and nobody wants it now.
  bool can_go(const Resident& resident, const Goal& goal) const {
    return goal.on_demand() && !goal.asked && resident.calls == 0;
  }

  void drain(const Resident& resident, std::string why) {
    add(resident.calls == 0 ? Kind::unload : Kind::drain, resident, std::move(why));
  }

  // Rules 7 and 8.
  void load(const Goal& goal) {
    const auto& residents = residents_of(goal.model, goal.version);
    const auto is = [&](const Resident* one) { return one->phase != ResidentPhase::draining && fulfils(*one, goal); };
    if (!goal.now() || std::ranges::any_of(residents, is)) return;
    if (loading_ >= actual_.loads_at_once) return;
    const std::int64_t need = need_of(goal.state->bundle);
    if (fits(need, 0, 0)) {
      ++loading_;
      ++resident_count_;
      free_ -= need;
      steps_.push_back({Kind::load, goal.model, goal.version, 0,
                        goal.asked  ? "a request waits for it"
                        : goal.used ? "it is used"
                                    : "it is kept"});
      return;
    }
    make_room(goal, need);
  }

  bool fits(std::int64_t need, std::int64_t freed_bytes, std::int64_t freed_count) const {
    const bool bytes = !actual_.free_bytes || need <= free_ + freed_bytes;
    const bool count = !actual_.max_resident || resident_count_ - freed_count < *actual_.max_resident;
    return bytes && count;
  }

  void make_room(const Goal& goal, std::int64_t need) {
    std::vector<const Resident*> idle;
    std::int64_t busy_bytes = 0, busy_count = 0;
    for (const Resident& resident : actual_.residents) {
      if (!in_memory(resident)) continue;
      if (going_.contains(resident.id) || resident.phase == ResidentPhase::draining) {
        busy_bytes += resident.bytes;
        ++busy_count;
        continue;
      }
      const Goal* its = goal_named(resident.model, resident.version);
      if (its == nullptr || !its->on_demand() || !fulfils(resident, *its)) continue;
      if (resident.phase == ResidentPhase::ready && can_go(resident, *its)) {
        idle.push_back(&resident);
      } else {
        busy_bytes += std::max(resident.bytes, need_of(resident.bundle));
        ++busy_count;
      }
    }
    std::ranges::stable_sort(idle, {}, &Resident::used_ms);
    std::int64_t freed = 0, count = 0;
    for (const Resident* one : idle) {
      if (fits(need, freed, count)) break;
      freed += one->bytes;
      ++count;
    }
    if (fits(need, freed, count)) {
      for (const Resident* one : std::span(idle).first(static_cast<std::size_t>(count)))
        add(Kind::unload, *one, "`" + goal.model + "` needs its place, and it was used longest ago");
      return;
    }
    const bool later = fits(need, freed + busy_bytes, count + busy_count);
    steps_.push_back({later ? Kind::wait : Kind::refuse, goal.model, goal.version, 0, no_room(need)});
  }

  std::string no_room(std::int64_t need) const {
    if (actual_.free_bytes && need > free_)
      return "it takes about " + mebibytes(need) + ", and " + mebibytes(std::max<std::int64_t>(0, free_)) + " are free";
    return std::to_string(resident_count_) + " models are in memory, and `--max-resident` is " +
           std::to_string(*actual_.max_resident);
  }

  void add(Kind kind, const Resident& resident, std::string why) {
    if (kind == Kind::unload && !going_.insert(resident.id).second) return;
    steps_.push_back({kind, resident.model, resident.version, resident.id, std::move(why)});
  }

  const Actual& actual_;
  const SettingsOf& settings_of_;
  std::map<ModelVersion, std::vector<const Resident*>> by_version_;
  std::map<ModelVersion, Goal> goals_;
  std::int64_t free_ = 0, resident_count_ = 0, loading_ = 0;
  std::set<std::uint64_t> going_;  // that a step unloads
  std::vector<Step> steps_;
};

}  // namespace

Needed needed_versions(const ModelState& model, const std::function<bool(const std::string& version)>& failed) {
  std::set<std::string, VersionLess> used;
  const auto use = [&](std::string_view name) {
    if (const std::string* version = version_named(model, name)) used.insert(*version);
  };
  for (const auto& [name, percent] : model.traffic)
    if (percent > 0) use(name);
  for (const auto& [label, version] : model.labels) use(version);
  if (const auto shadow = shadow_of(model)) use(shadow->version);
  if (model.rollout && model.rollout->phase != RolloutPhase::promoted) {
    use(model.rollout->version);
    use(model.rollout->from);
  }
  std::vector<std::string> others;  // best first
  for (const auto& [version, state] : model.versions)
    if (!failed(version)) others.insert(others.begin(), version);
  if (model.traffic.empty() && !others.empty()) use(others.front());
  std::stable_partition(others.begin(), others.end(),
                        [&](const std::string& version) { return version == model.previous; });
  Needed needed{{used.begin(), used.end()}, {}};
  for (const std::string& version : others)
    if (!used.contains(version) && static_cast<std::int64_t>(needed.kept.size()) < model.keep)
      needed.kept.push_back(version);
  // A version that failed is still named, so that its note stays.
  for (const auto& [version, state] : model.versions)
    if (!used.contains(version) && failed(version)) needed.kept.push_back(version);
  return needed;
}

std::vector<Step> next_steps(const DesiredState& desired, const Actual& actual, const SettingsOf& settings_of) {
  return Reconciler(desired, actual, settings_of).steps();
}

std::int64_t instances_for(const InstanceRange& range, const Crowd& crowd) {
  std::int64_t instances = crowd.instances;
  if (crowd.waiting_ms >= kCrowdedMs && crowd.free_cores > 0)
    ++instances;
  else if (crowd.spare_ms >= kQuietMs)
    --instances;
  return std::clamp(instances, range.min, range.max);
}

}  // namespace mctl
