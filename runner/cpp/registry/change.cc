#include "registry/change.h"

#include <algorithm>
#include <array>
#include <set>

#include "format/text.h"
#include "registry/merge_patch.h"
#include "registry/reading.h"

namespace mctl {
namespace {

namespace json = boost::json;

constexpr std::string_view kStable = "stable";

Error conflict(const std::string& where, std::string_view what) {
  return {Code::conflict, printable("models." + where + ' ' + std::string(what))};
}

std::string label_of(const ModelState& model, std::string_view label) {
  const auto found = model.labels.find(label);
  return found != model.labels.end() ? found->second : std::string();
}

// The version that has all the traffic, `except` aside where nothing is said about traffic; empty: there is none.
std::string sole_version(const ModelState& model, std::string_view except) {
  std::string sole;
  if (model.traffic.empty()) {
    for (const auto& [name, version] : model.versions)
      if (name != except) sole = name;  // the highest is the last
    return sole;
  }
  for (const auto& [name, percent] : model.traffic) {
    if (percent == 0) continue;
    const std::string* version = version_named(model, name);
    if (version == nullptr || (!sole.empty() && sole != *version)) return {};
    sole = *version;
  }
  return sole;
}

// Rule 2.
void begin_rollout(const std::string& name, ModelState& model, std::string& fault) {
  if (!model.rolls() || !model.rollout->from.empty()) return;
  Rollout& rollout = *model.rollout;
  const std::string where = "models." + name + ".rollout";
  if (!model.versions.contains(rollout.version)) return;  // check_model says so
  rollout.from = sole_version(model, rollout.version);
  if (rollout.from.empty() && model.traffic.empty())
    return keep_fault(fault, where, "has no version to begin from: `" + rollout.version + "` is the only one");
  if (rollout.from.empty())
    return keep_fault(fault, where, "begins from one version, but traffic is split: give one of them all of it first");
  model.labels[std::string(kStable)] = rollout.from;
  model.traffic = {{std::string(kStable), 100}};
}

// Rule 1.
void note_previous(const ModelState* before, ModelState& model) {
  if (before == nullptr) return;
  const std::string was = label_of(*before, kStable), is = label_of(model, kStable);
  const bool moved = !was.empty() && !is.empty() && was != is;
  if (moved && model.previous == before->previous) model.previous = was;
  if (!model.versions.contains(model.previous)) model.previous.clear();
}

// Rule 3, of a model that a person changes.
Status check_running(const std::string& name, const ModelState& before, const ModelState& after) {
  if (!before.rolls() || !after.rolls()) return Done{};
  const Rollout& rollout = *before.rollout;
  const std::string goes = "a rollout from version `" + rollout.from + "` to `" + rollout.version +
                           "` runs: end it first, with \"rollout\": null";
  if (*after.rollout != rollout) return conflict(name + ".rollout", "cannot be changed while " + goes);
  if (after.traffic != before.traffic) return conflict(name + ".traffic", "cannot be changed while " + goes);
  if (label_of(after, kStable) != label_of(before, kStable))
    return conflict(name + ".labels.stable", "cannot be moved while " + goes);
  for (const std::string& version : {rollout.from, rollout.version}) {
    const auto is = after.versions.find(version);
    if (is == after.versions.end() || is->second != before.versions.at(version))
      return conflict(name + ".versions." + version, "cannot be changed while " + goes);
  }
  return Done{};
}

// Only the server writes how a rollout goes.
Status check_record(const std::string& name, const ModelState* before, const ModelState& after) {
  if (!after.rollout || (before != nullptr && before->rollout == after.rollout)) return Done{};
  Rollout asked = *after.rollout;
  asked.from.clear();
  asked.phase = RolloutPhase::loading;
  asked.step = 0;
  asked.reason.clear();
  asked.evidence.clear();
  if (asked == *after.rollout) return Done{};
  return Error{Code::invalid, "models." + printable(name) +
                                  ".rollout has fields that the server writes: leave out `from`, `phase`, `step`, "
                                  "`reason` and `evidence`"};
}

Status check_owner(const std::string& name, const ModelState* before, const ModelState* after, Owner owner) {
  static const ModelState none;
  const auto files = [](const ModelState* model) {
    std::set<std::array<std::string, 3>> all;
    for (const auto& [version, state] : (model != nullptr ? *model : none).versions)
      all.insert({version, state.bundle, state.digest});
    return all;
  };
  if (owner == Owner::state || ((before != nullptr) == (after != nullptr) && files(before) == files(after)))
    return Done{};
  const std::string whose = owner == Owner::folder ? "the folder that is served" : "the file of `--config`";
  return conflict(name, "has the versions that " + whose + " has: change them there, or serve with `--state` only");
}

// Rule 4: what a patch of the rollout is merged into.
json::object target_of(const ModelState& model, const json::value& patch) {
  json::object target = model_to_json(model);
  const auto* changes = patch.if_object();
  const auto* rollout = changes != nullptr ? changes->if_contains("rollout") : nullptr;
  if (rollout != nullptr && model.rollout && !model.rollout->runs()) target.erase("rollout");
  return target;
}

Result<ModelState> changed_model(const std::string& name, const ModelState* before, const json::value& patch,
                                 ChangedBy by) {
  std::string fault;
  const std::string where = "models." + name;
  const json::value document =
      merged(before != nullptr ? json::value(target_of(*before, patch)) : json::value(), patch);
  ModelState after = model_from_json(document, where, fault);
  if (!fault.empty()) return Error{Code::invalid, printable(fault)};
  if (by == ChangedBy::person) {
    if (auto free = before != nullptr ? check_running(name, *before, after) : Status(Done{}); !free)
      return free.error();
    if (auto own = check_record(name, before, after); !own) return own.error();
  }
  begin_rollout(name, after, fault);
  note_previous(before, after);
  check_model(name, after, fault);
  if (!fault.empty()) return Error{Code::invalid, printable(fault)};
  return after;
}

Status change_model(DesiredState& state, const std::string& name, const json::value& patch, Owner owner, ChangedBy by) {
  const auto found = state.models.find(name);
  const ModelState* before = found != state.models.end() ? &found->second : nullptr;
  if (patch.is_null()) {
    if (auto allowed = check_owner(name, before, nullptr, owner); !allowed) return allowed;
    state.models.erase(name);
    return Done{};
  }
  auto after = changed_model(name, before, patch, by);
  if (!after) return after.error();
  if (auto allowed = check_owner(name, before, &*after, owner); !allowed) return allowed;
  state.models.insert_or_assign(name, *std::move(after));
  return Done{};
}

// --- what the owner has --------------------------------------------------------------------------------------------

// What the owner changed, else what is there.
template <class T>
T newer(const T& there, const T* before, const T& now) {
  return before != nullptr && *before != now ? now : there;
}

void drop_dangling(ModelState& model) {
  std::erase_if(model.labels, [&](const auto& label) { return !model.versions.contains(label.second); });
  const bool gone = std::ranges::any_of(
      model.traffic, [&](const auto& share) { return share.second > 0 && !version_named(model, share.first); });
  std::erase_if(model.traffic, [&](const auto& share) { return !version_named(model, share.first); });
  if (gone) model.traffic.clear();  // what is left does not add up
  if (model.shadow && !version_named(model, model.shadow->version)) model.shadow.reset();
  if (!model.versions.contains(model.previous)) model.previous.clear();
  if (!model.rolls()) return;
  if (!model.versions.contains(model.rollout->from)) return model.rollout.reset();
  if (model.versions.contains(model.rollout->version)) return;
  model.rollout->phase = RolloutPhase::taken_back;
  model.rollout->reason = "version `" + model.rollout->version + "` is gone";
}

ModelState adopted_model(const ModelState& there, const ModelState* before, const ModelState& now) {
  const auto old = [&](auto member) { return before != nullptr ? &(before->*member) : nullptr; };
  ModelState model = there;
  model.labels = newer(there.labels, old(&ModelState::labels), now.labels);
  model.traffic = newer(there.traffic, old(&ModelState::traffic), now.traffic);
  model.shadow = newer(there.shadow, old(&ModelState::shadow), now.shadow);
  model.keep = newer(there.keep, old(&ModelState::keep), now.keep);
  model.settings = newer(there.settings, old(&ModelState::settings), now.settings);
  model.versions = now.versions;
  for (auto& [name, version] : model.versions) {
    const auto is = there.versions.find(name);
    if (is == there.versions.end()) continue;
    const auto was = before != nullptr ? before->versions.find(name) : now.versions.end();
    const bool told = before != nullptr && was != before->versions.end();
    version.settings = newer(is->second.settings, told ? &was->second.settings : nullptr, version.settings);
  }
  drop_dangling(model);
  return model;
}

}  // namespace

Result<DesiredState> changed(const DesiredState& state, const json::value& patch, Owner owner, ChangedBy by) {
  std::string fault;
  only_fields(patch, {"schema", "models", "aliases"}, "", fault);
  if (!fault.empty()) return Error{Code::invalid, printable(fault)};
  const json::object& object = patch.get_object();
  if (const auto* schema = object.if_contains("schema"); schema != nullptr && *schema != json::value(kStateSchema))
    return Error{Code::invalid, "schema is " + shown(*schema) + ", allowed is `" + std::string(kStateSchema) + '`'};
  DesiredState after = state;
  if (const auto* models = object.if_contains("models")) {
    if (!models->is_object()) return Error{Code::invalid, "models is no object: take models away one by one"};
    for (const auto& [name, change] : models->get_object())
      if (auto done = change_model(after, std::string(name), change, owner, by); !done) return done.error();
  }
  if (const auto* aliases = object.if_contains("aliases")) {
    const json::value all = aliases->is_null() ? json::object() : merged(json::value_from(state.aliases), *aliases);
    after.aliases = aliases_from_json(all, fault);
  }
  check_aliases(after, fault);
  if (!fault.empty()) return Error{Code::invalid, printable(fault)};
  return after;
}

DesiredState adopted(const DesiredState& state, const DesiredState& before, const DesiredState& now) {
  DesiredState after;
  for (const auto& [name, model] : now.models) {
    const auto there = state.models.find(name), was = before.models.find(name);
    after.models[name] = there == state.models.end()
                             ? model
                             : adopted_model(there->second, was != before.models.end() ? &was->second : nullptr, model);
  }
  after.aliases = newer(state.aliases, &before.aliases, now.aliases);
  std::erase_if(after.aliases, [&](const auto& alias) {
    return !after.models.contains(alias.second) || after.models.contains(alias.first);
  });
  return after;
}

Result<DesiredState> completed(DesiredState state) {
  std::string fault;
  for (auto& [name, model] : state.models) begin_rollout(name, model, fault);
  if (!fault.empty()) return Error{Code::usage, printable(fault)};
  return state;
}

}  // namespace mctl
