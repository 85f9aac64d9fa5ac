// The part of the fleet that has models in memory only while somebody asks for them, and keeps within what memory there
// is.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>

#include "pool/memory.h"
#include "registry/fleet.h"
#include "registry/traffic.h"

namespace mctl {
namespace {

// What a process has for itself, beside what it has mapped of files: the second number of /proc/PID/statm, without the
// third. 0 if it is gone.
std::int64_t own_bytes(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/statm");
  std::int64_t all = 0, resident = 0, shared = 0;
  file >> all >> resident >> shared;
  return std::max<std::int64_t>(0, resident - shared) * sysconf(_SC_PAGESIZE);
}

std::int64_t size_of(const std::string& path) {
  std::error_code gone;
  const auto size = std::filesystem::file_size(path, gone);
  return gone ? 0 : static_cast<std::int64_t>(size);
}

}  // namespace

// --- while nobody asks

// Each on-demand version that is not in memory is open, so that what it is can be told. One that cannot be opened has
// failed to load.
void Fleet::put_to_sleep() {
  std::set<ModelVersion> wanted, in_memory;
  for (const auto& held : held_) in_memory.insert({held->as.model, held->as.version});
  for (const auto& [name, model] : desired_.models)
    for (const auto& [version, state] : model.versions)
      if (settings_of(name, version).load == LoadWhen::on_demand) wanted.insert({name, version});
  on_demand_ = !wanted.empty();
  sleepers_.keep_only([&](const ModelVersion& which) { return wanted.contains(which) && !in_memory.contains(which); });
  for (const ModelVersion& which : wanted) {
    if (in_memory.contains(which)) continue;
    auto source = source_of(which);
    if (sleepers_.has(which, source)) continue;
    auto model = open(which, source);
    if (model) {
      sleepers_.put(which, std::move(source), *std::move(model));
    } else {
      fail(hold(which, source), model.error());
    }
  }
}

bool Fleet::comes_and_goes() const {
  return !refused_.empty() || !wakes_.empty() || std::ranges::any_of(held_, [](const auto& held) {
    return held->on_demand() && held->as.phase == ResidentPhase::ready;
  });
}

std::vector<std::shared_ptr<ServedModel>> Fleet::known() const {
  auto all = models_.all();
  for (auto& sleeper : sleepers_.all()) all.push_back(std::move(sleeper));
  const auto before = [](const auto& one, const auto& other) {
    return one->name() != other->name() ? one->name() < other->name() : VersionLess()(one->version(), other->version());
  };
  std::ranges::sort(all, before);
  return all;
}

bool Fleet::knows(std::string_view name, std::string_view version) const {
  const auto model = desired_.models.find(real_name(name));
  return model != desired_.models.end() && version_named(model->second, version) != nullptr;
}

// --- memory

// What a version will take is what its bundle took here before: the file, and its workers' own memory. Before it was in
// memory once, it is the file.
void Fleet::note_needs(Actual& actual) {
  for (Resident& resident : actual.residents) {
    if (resident.phase != ResidentPhase::ready) continue;
    std::int64_t own = 0;
    for (const pid_t pid : held_by(resident.id)->model->gauges().workers) own += own_bytes(pid);
    resident.bytes = size_of(resident.bundle) + own;
    needs_[resident.bundle] = resident.bytes;
  }
  std::set<std::string_view> desired;
  for (const auto& [name, model] : desired_.models)
    for (const auto& [version, state] : model.versions) {
      desired.insert(state.bundle);
      if (!needs_.contains(state.bundle)) needs_[state.bundle] = size_of(state.bundle);
    }
  std::erase_if(needs_, [&](const auto& need) { return !desired.contains(need.first); });
  actual.needs = needs_;
  if (const auto free = memory_free()) actual.free_bytes = static_cast<std::int64_t>(*free);
}

// --- requests

// The versions that a request may go to: the one that it names, or those that have traffic.
std::vector<std::string> Fleet::wanted_of(const std::string& name, std::string_view asked) const {
  const auto model = desired_.models.find(name);
  if (model == desired_.models.end()) return {};
  if (!asked.empty()) {
    const std::string* const version = version_named(model->second, asked);
    return version != nullptr ? std::vector{*version} : std::vector<std::string>();
  }
  auto versions = wanted_versions(model->second);
  if (versions.empty())
    if (const Needed needed = needed_of(name, model->second); !needed.used.empty()) versions = {needed.used.back()};
  return versions;
}

std::vector<ModelVersion> Fleet::asleep(std::string_view asked, std::string_view asked_version) const {
  if (!on_demand_) return {};
  const std::string name(real_name(asked));
  std::vector<ModelVersion> asleep;
  for (const std::string& version : wanted_of(name, asked_version)) {
    if (settings_of(name, version).load != LoadWhen::on_demand) continue;
    const auto is = [&](const auto& held, ResidentPhase phase) {
      return held->as.model == name && held->as.version == version && held->as.phase == phase;
    };
    const bool told = std::ranges::any_of(held_, [&](const auto& held) {
      return is(held, ResidentPhase::failed) || (is(held, ResidentPhase::ready) && held->as.serving);
    });
    if (!told) asleep.emplace_back(name, version);
  }
  return asleep;
}

bool Fleet::wake(std::string_view name, std::string_view version, std::function<void()> then) {
  if (!on_demand_ || draining_) return false;
  mark_used(real_name(name));
  auto versions = asleep(name, version);
  if (versions.empty()) return false;
  wakes_.push_back({std::move(versions), std::move(then)});
  schedule();
  return true;
}

void Fleet::mark_used(std::string_view name) {
  const std::int64_t now = now_ns() / 1'000'000;
  for (const auto& held : held_)
    if (held->on_demand() && held->as.model == name) held->as.used_ms = now;
}

// Both versions of a rollout are watched, whether somebody asks for them or not.
void Fleet::note_asked(Actual& actual) const {
  for (const Wake& wake : wakes_) actual.asked.insert(wake.versions.begin(), wake.versions.end());
  for (const auto& [name, model] : desired_.models) {
    if (!model.rolls()) continue;
    actual.asked.insert({name, model.rollout->version});
    actual.asked.insert({name, model.rollout->from});
  }
}

void Fleet::tell_woken() {
  std::map<ModelVersion, bool> settled;
  const auto is_settled = [&](const ModelVersion& which) {
    const auto [known, fresh] = settled.try_emplace(which, false);
    if (fresh) known->second = fate_of(which.first, which.second).has_value();
    return known->second;
  };
  std::vector<Wake> woken;
  std::erase_if(wakes_, [&](Wake& wake) {
    if (!std::ranges::all_of(wake.versions, is_settled)) return false;
    woken.push_back(std::move(wake));
    return true;
  });
  for (const Wake& wake : woken) wake.then();
}

}  // namespace mctl
