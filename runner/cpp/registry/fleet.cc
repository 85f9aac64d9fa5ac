#include "registry/fleet.h"

#include <algorithm>
#include <boost/asio/post.hpp>
#include <chrono>
#include <thread>
#include <utility>

#include "format/text.h"
#include "registry/merge_patch.h"

namespace mctl {
namespace {

namespace json = boost::json;
using namespace std::chrono_literals;
using Kind = Step::Kind;

constexpr int kMostRounds = 64;        // of steps that follow from each other at once
constexpr auto kWhileItDrains = 20ms;  // between two looks
constexpr auto kOnDemand = 1s;

// What a state may say and this server does not do: better refused than passed over.
Status check_settings(const std::string& where, const SettingsLayer& settings) {
  const auto no = [&](std::string_view what) {
    return Error{Code::unimplemented, where + ": this server does not do " + std::string(what) + " yet"};
  };
  if (settings.priority && *settings.priority != Priority::normal) return no("priorities");
  if (settings.instances && settings.instances->min != settings.instances->max)
    return no("instances that follow the load");
  return Done{};
}

Status check_supported(const DesiredState& state, const std::map<std::string, SettingsLayer, std::less<>>& layers) {
  for (const auto& [name, layer] : layers)
    if (auto done = check_settings(name + "/serve.toml", layer); !done) return done;
  for (const auto& [name, model] : state.models) {
    const std::string where = "models." + name;
    if (auto done = check_settings(where + ".settings", model.settings); !done) return done;
    for (const auto& [version, its] : model.versions)
      if (auto done = check_settings(where + ".versions." + version + ".settings", its.settings); !done) return done;
  }
  return Done{};
}

std::string called(const std::string& model, const std::string& version) {
  return "model '" + model + "', version '" + version + "'";
}

}  // namespace

Fleet::Fleet(boost::asio::io_context& io, Reaper& reaper, FleetSettings settings, Say say)
    : io_(io), reaper_(reaper), settings_(std::move(settings)), say_(std::move(say)), timer_(io) {}

// --- what is desired -----------------------------------------------------------------------------------------------

Status Fleet::prepare(Owned now, std::optional<StateStore> store) {
  owned_ = std::move(now);
  DesiredState state = owned_.state;
  if (store) {
    auto kept = store->read();
    if (!kept) return kept.error();
    if (*kept) state = settings_.owner == Owner::state ? **kept : adopted(**kept, owned_.state, owned_.state);
    store_.emplace(*std::move(store));
  }
  auto complete = completed(std::move(state));
  if (!complete) return complete.error();
  if (auto done = check_supported(*complete, owned_.layers); !done) return Error{Code::usage, done.error().text};
  if (auto kept = keep(*complete); !kept) return kept;
  desired_ = *std::move(complete);
  for (const std::string& why : owned_.left_out) say_("warning: " + why);
  return Done{};
}

Status Fleet::keep(const DesiredState& after) {
  const std::string printed = print_state(after);
  if (store_)
    if (auto written = store_->write(printed); !written) return written;
  etag_ = etag_of(printed);
  return Done{};
}

void Fleet::apply(DesiredState after, std::string_view by) {
  json::value patch = merge_difference(state_to_json(desired_), state_to_json(after));
  desired_ = std::move(after);
  events_.tell("changed", {{"by", by}, {"patch", std::move(patch)}});
  direct();  // at once: traffic does not wait
  schedule();
}

Status Fleet::change(const json::value& patch, std::string_view by, ChangedBy who) {
  auto after = changed(desired_, patch, settings_.owner, who);
  if (!after) return after.error();
  if (auto done = check_supported(*after, owned_.layers); !done) return done;
  if (*after == desired_) return Done{};
  if (auto kept = keep(*after); !kept) return kept;
  apply(*std::move(after), by);
  return Done{};
}

void Fleet::change_by_server(const json::value& patch, std::string_view by) {
  auto after = changed(desired_, patch, settings_.owner, ChangedBy::server);
  if (!after) return say_("warning: " + after.error().text);
  if (auto kept = keep(*after); !kept) say_("warning: " + kept.error().text);
  apply(*std::move(after), by);
}

void Fleet::adopt(Owned now) {
  if (now == owned_) return;
  const std::string_view owner = settings_.owner == Owner::folder ? "folder" : "config";
  auto after = completed(adopted(desired_, owned_.state, now.state));
  if (after)
    if (auto done = check_supported(*after, now.layers); !done) after = done.error();
  if (!after) return say_("warning: nothing has changed: " + after.error().text);
  for (const std::string& why : now.left_out)
    if (std::ranges::find(owned_.left_out, why) == owned_.left_out.end()) say_("warning: " + why);
  const auto touched = [&](const Held& held) {
    const auto was = owned_.touched_ns.find(held.as.bundle), is = now.touched_ns.find(held.as.bundle);
    return is != now.touched_ns.end() && (was == owned_.touched_ns.end() || was->second != is->second);
  };
  std::erase_if(held_, [&](const auto& held) { return held->as.phase == ResidentPhase::failed && touched(*held); });
  owned_ = std::move(now);
  if (auto kept = keep(*after); !kept) say_("warning: " + kept.error().text);
  *after == desired_ ? schedule() : apply(*std::move(after), owner);
}

SettingsLayer Fleet::settings_of(const std::string& model, const std::string& version) const {
  static const SettingsLayer none;
  const auto layer = owned_.layers.find(model);
  const auto state = desired_.models.find(model);
  if (state == desired_.models.end()) return none;
  const auto its = state->second.versions.find(version);
  return resolved({its != state->second.versions.end() ? &its->second.settings : &none, &state->second.settings,
                   layer != owned_.layers.end() ? &layer->second : &none});
}

// --- what is in memory ---------------------------------------------------------------------------------------------

void Fleet::begin(std::function<void(const Error&)> hopeless) {
  hopeless_ = std::move(hopeless);
  began_ = true;
  reconcile();
}

void Fleet::schedule() {
  if (!began_ || scheduled_ || draining_) return;
  scheduled_ = true;
  boost::asio::post(io_, guard_([this] {
                      scheduled_ = false;
                      reconcile();
                    }));
}

void Fleet::reconcile() {
  if (draining_) return;
  leaving_.clear();
  const SettingsOf settings = [this](const std::string& model, const std::string& version) {
    return settings_of(model, version);
  };
  put_to_sleep();
  bool moves = true;
  for (int round = 0; moves && round < kMostRounds; ++round) {
    refused_.clear();
    moves = false;
    for (const Step& step : next_steps(desired_, actual(), settings)) moves |= take(step);
    direct();
  }
  put_to_sleep();
  note_start();
  tell_waiters();
  tell_woken();
  look_again_soon();
}

Actual Fleet::actual() {
  Actual actual;
  for (const auto& held : held_) {
    actual.residents.push_back(held->as);
    if (held->model) actual.residents.back().calls = held->model->idle() ? 0 : 1;
  }
  actual.loads_at_once = std::max(1u, std::thread::hardware_concurrency());
  actual.now_ms = now_ns() / 1'000'000;
  actual.max_resident = settings_.max_resident;
  note_needs(actual);
  note_asked(actual);
  return actual;
}

// True if something else is in memory now.
bool Fleet::take(const Step& step) {
  switch (step.kind) {
    case Kind::load:
      load(step);
      return true;
    case Kind::switch_over:
      switch_over(*held_by(step.resident));
      return true;
    case Kind::drain: {
      Held& held = *held_by(step.resident);
      held.as.phase = ResidentPhase::draining;
      held.as.serving = false;
      held.model->drain();
      models_.remove(*held.model);
      return true;
    }
    case Kind::unload:
      unload(step.resident, step.why);
      return true;
    case Kind::wait:
      return false;
    case Kind::refuse:
      refused_[{step.model, step.version}] = step.why;
      return false;
  }
  return false;
}

Fleet::Held* Fleet::held_by(std::uint64_t id) {
  const auto found = std::ranges::find(held_, id, [](const auto& held) { return held->as.id; });
  return found != held_.end() ? found->get() : nullptr;
}

Sleepers::Source Fleet::source_of(const ModelVersion& which) const {
  const VersionState& state = desired_.models.at(which.first).versions.at(which.second);
  const auto touched = owned_.touched_ns.find(state.bundle);
  return {state.bundle, state.digest, settings_of(which.first, which.second),
          touched != owned_.touched_ns.end() ? touched->second : 0};
}

Fleet::Held& Fleet::hold(const ModelVersion& which, const Sleepers::Source& source) {
  Held& held = *held_.emplace_back(std::make_unique<Held>());
  held.as.id = next_id_++;
  held.as.model = which.first;
  held.as.version = which.second;
  held.as.bundle = source.bundle;
  held.as.digest = source.digest;
  held.as.settings = source.settings;
  held.as.used_ms = now_ns() / 1'000'000;
  return held;
}

Result<std::shared_ptr<ServedModel>> Fleet::open(const ModelVersion& which, const Sleepers::Source& source) {
  auto model = ServedModel::open(io_, reaper_, {source.bundle, which.first, which.second},
                                 settings_with(settings_.flags, source.settings), settings_.runtime, settings_.null);
  if (!model) return model;
  const std::string& digest = (*model)->manifest().digest;
  if (source.digest.empty() || source.digest == digest) return model;
  return Error{Code::damaged, "`" + source.bundle + "` is another bundle than the one that was asked for: its digest " +
                                  "is " + digest.substr(0, 12) + "…, not " + source.digest.substr(0, 12) + "…"};
}

void Fleet::load(const Step& step) {
  const ModelVersion which{step.model, step.version};
  const auto source = source_of(which);
  Held& held = hold(which, source);
  events_.tell("loading", {{"model", step.model}, {"version", step.version}, {"why", step.why}});
  held.model = sleepers_.take(which, source);
  if (!held.model) {
    auto model = open(which, source);
    if (!model) return fail(held, model.error());
    held.model = *std::move(model);
  }
  held.as.digest = held.model->manifest().digest;
  if (!models_.find(step.model, step.version)) models_.put(held.model);
  start(held);
}

void Fleet::start(Held& held) {
  const std::uint64_t id = held.as.id;
  ServedModel::Events events;
  events.changed = [this, id] { on_changed(id); };
  events.noted = say_;
  events.called = [this, model = held.model.get()](const CallOrigin& origin, HandlerCall& call, const Caller& caller) {
    return handlers_.called(*model, origin, call, caller);
  };
  events.failed = [this, id](const Error& error) { on_failed(id, error); };
  if (auto started = held.model->start(std::move(events)); !started) return fail(held, started.error());
  on_changed(id);
}

void Fleet::on_changed(std::uint64_t id) {
  Held* const held = held_by(id);
  if (held == nullptr || !held->model) return;
  if (held->as.phase == ResidentPhase::loading) {
    if (!held->model->ready()) return;
    if (held->model->handler() != nullptr) {
      if (auto sound = handlers_.check(*held->model); !sound) return fail(*held, sound.error());
    }
    held->as.phase = ResidentPhase::ready;
    say_("ready: " + held->as.model + ", version " + held->as.version);
    events_.tell("ready", {{"model", held->as.model}, {"version", held->as.version}});
    schedule();
  }
  direct();
}

void Fleet::on_failed(std::uint64_t id, const Error& error) {
  Held* const held = held_by(id);
  if (held != nullptr && held->as.phase == ResidentPhase::loading) fail(*held, error);
}

void Fleet::fail(Held& held, const Error& error) {
  held.as.phase = ResidentPhase::failed;
  held.failure = error;
  if (held.model) {
    models_.remove(*held.model);
    leaving_.push_back(std::exchange(held.model, nullptr));
  }
  warnings_.push_back("warning: " + called(held.as.model, held.as.version) + ": " + error.text);
  events_.tell("failed", {{"model", held.as.model}, {"version", held.as.version}, {"why", error.text}});
  schedule();
}

void Fleet::switch_over(Held& held) {
  for (const auto& other : held_)
    if (other->as.model == held.as.model && other->as.version == held.as.version) other->as.serving = false;
  held.as.serving = true;
  models_.put(held.model);
}

void Fleet::unload(std::uint64_t id, const std::string& why) {
  const auto found = std::ranges::find(held_, id, [](const auto& held) { return held->as.id; });
  if (found == held_.end()) return;
  const Held& held = **found;
  if (held.model) {
    models_.remove(*held.model);
    events_.tell("unloaded", {{"model", held.as.model}, {"version", held.as.version}, {"why", why}});
  }
  held_.erase(found);
}

void Fleet::forget_failures(std::string_view model) {
  std::erase_if(held_, [&](const auto& held) {
    return held->as.phase == ResidentPhase::failed && (model.empty() || held->as.model == model);
  });
  schedule();
}

// Where requests go follows from what is desired and what can answer. A version that is not desired any more goes on
// for as long as no other one can. One whose processes are on their way back has requests while none is ready.
void Fleet::direct() {
  for (const auto& held : held_)
    if (held->as.serving && !desired_.models.contains(held->as.model)) stop_serving(*held);
  for (const auto& [name, model] : desired_.models) {
    const auto of = [&, &name = name](const std::string& version) -> const ServedModel* {
      const auto found = models_.find(name, version);
      return found && (*found)->version() == version ? *found : nullptr;
    };
    const auto ready = [&](const std::string& version) { return of(version) && of(version)->ready(); };
    const auto takes = [&](const std::string& version) { return of(version) && of(version)->takes_requests(); };
    direct_shadow(name, model);
    auto shares = shares_of(model, ready, models_.last_shares(name));
    if (shares.empty()) shares = shares_of(model, takes, models_.last_shares(name));
    models_.direct(name, std::move(shares), model.labels);
  }
  for (const auto& held : held_)
    held->as.routed = held->as.serving && std::ranges::find(models_.shares(held->as.model), held->as.version,
                                                            &Share::version) != models_.shares(held->as.model).end();
  for (const auto& held : held_) {
    if (!held->as.serving || held->as.routed) continue;
    if (!desired_.models.at(held->as.model).versions.contains(held->as.version)) stop_serving(*held);
  }
}

void Fleet::stop_serving(Held& held) {
  held.as.serving = false;
  models_.remove(*held.model);
}

void Fleet::direct_shadow(const std::string& name, const ModelState& model) {
  const auto shadow = shadow_of(model);
  const auto turn = shadows_.find(name);
  if (!shadow) return void(turn != shadows_.end() ? shadows_.erase(turn) : turn);
  if (turn != shadows_.end() && turn->second.shadow == *shadow) return;
  std::optional<Schedule> schedule;
  if (shadow->percent < 100) schedule.emplace(std::vector<std::int64_t>{shadow->percent, 100 - shadow->percent});
  shadows_.insert_or_assign(name, ShadowTurn{*shadow, std::move(schedule)});
}

ServedModel* Fleet::shadow_for(const ServedModel& answered) {
  if (shadows_.empty()) return nullptr;
  const auto turn = shadows_.find(answered.name());
  if (turn == shadows_.end()) return nullptr;
  const auto found = models_.find(answered.name(), turn->second.shadow.version);
  if (!found || *found == &answered || !(*found)->ready()) return nullptr;
  return turn->second.schedule && turn->second.schedule->next() != 0 ? nullptr : *found;
}

void Fleet::look_again_soon() {
  const bool drains =
      std::ranges::any_of(held_, [](const auto& held) { return held->as.phase == ResidentPhase::draining; });
  if (looks_ || !(drains || comes_and_goes())) return;
  looks_ = true;
  timer_.expires_after(drains ? std::chrono::milliseconds(kWhileItDrains) : kOnDemand);
  timer_.async_wait(guard_([this](boost::system::error_code ec) {
    looks_ = false;
    if (!ec) reconcile();
  }));
}

void Fleet::drain() {
  draining_ = true;
  for (const auto& held : held_)
    if (held->model) held->model->drain();
  for (const Wake& wake : std::exchange(wakes_, {})) wake.then();
}

bool Fleet::idle() const {
  return std::ranges::all_of(held_, [](const auto& held) { return !held->model || held->model->idle(); });
}

// --- how it stands -------------------------------------------------------------------------------------------------

Needed Fleet::needed_of(const std::string& name, const ModelState& model) const {
  return needed_versions(model, [&](const std::string& version) {
    return std::ranges::any_of(held_, [&](const auto& held) {
      return held->as.model == name && held->as.version == version && held->as.phase == ResidentPhase::failed;
    });
  });
}

// Of a version that is to be in memory: it is ready, or why not; nullopt: that is to be seen.
std::optional<Status> Fleet::fate_of(const std::string& name, const std::string& version) const {
  const auto model = desired_.models.find(name);
  if (model == desired_.models.end() || !model->second.versions.contains(version))
    return Status(Error{Code::conflict, called(name, version) + " was taken away meanwhile"});
  const Held* ready = nullptr;
  const Held* failed = nullptr;
  for (const auto& held : held_) {
    if (held->as.model != name || held->as.version != version) continue;
    if (held->as.phase == ResidentPhase::loading) return std::nullopt;
    if (held->as.phase == ResidentPhase::failed) failed = held.get();
    if (held->as.phase == ResidentPhase::ready && held->as.serving) ready = held.get();
  }
  if (failed != nullptr) return Status(failed->failure);
  if (ready != nullptr) return Status(Done{});
  if (const auto refused = refused_.find({name, version}); refused != refused_.end())
    return Status(Error{Code::unavailable, refused->second});
  return std::nullopt;
}

// Of any version.
std::optional<Status> Fleet::outcome_of(const std::string& name, const std::string& version) const {
  if (auto fate = fate_of(name, version)) return fate;
  if (sleepers_.has({name, version})) return Status(Done{});
  const bool loads = std::ranges::any_of(held_, [&](const auto& held) {
    return held->as.model == name && held->as.version == version && held->as.phase == ResidentPhase::loading;
  });
  if (loads) return std::nullopt;
  const Needed needed = needed_of(name, desired_.models.at(name));
  const auto among = [&](const auto& versions) { return std::ranges::find(versions, version) != versions.end(); };
  if (among(needed.used) || among(needed.kept)) return std::nullopt;
  return Status(Done{});
}

// A request that names no version finds one that is ready.
bool Fleet::answers(std::string_view name) const {
  return std::ranges::any_of(models_.shares(name), [&](const Share& share) {
    const auto found = models_.find(name, share.version);
    return found && (*found)->ready();
  });
}

Fleet::Standing Fleet::standing_of(const std::string& name, const ModelState& model) const {
  if (answers(name) || sleepers_.find(name, "") != nullptr) return {Standing::answers, ""};
  const Needed needed = needed_of(name, model);
  std::string failure = "it has no version";
  for (const auto& versions : {needed.used, needed.kept}) {
    for (const std::string& version : versions) {
      const auto found = models_.find(name, version);
      const auto outcome = outcome_of(name, version);
      if (outcome && !*outcome) failure = outcome->error().text;
      if (found && !(*found)->ready()) return {Standing::waits, (*found)->ready().error().text};
      if (!outcome) return {Standing::waits, "loading: its turn has not come yet"};
    }
  }
  return {Standing::failed, failure};
}

Status Fleet::ready() const {
  const bool one = desired_.models.size() == 1;
  bool any = false;
  std::string wrong = desired_.models.empty() ? "there is no model yet" : "";
  std::string waits;
  for (const auto& [name, model] : desired_.models) {
    const Standing standing = standing_of(name, model);
    any |= standing.kind == Standing::answers;
    const std::string why = one ? standing.why : name + ": " + standing.why;
    if (standing.kind == Standing::waits && waits.empty()) waits = why;
    if (standing.kind != Standing::answers && wrong.empty()) wrong = why;
  }
  if (!started_ && !waits.empty()) return Error{Code::unavailable, waits};
  if (settings_.ready_all && wrong.empty() && !owned_.left_out.empty()) wrong = owned_.left_out.front();
  if (any && !(settings_.ready_all && !wrong.empty())) return Done{};
  return Error{Code::unavailable, wrong};
}

Status Fleet::ready(std::string_view name, std::string_view version) const {
  const auto found = find(name, version);
  if (!found) return found.error();
  if (version.empty() && answers(real_name(name))) return Done{};
  return sleeps(name, version) ? Done{} : (*found)->ready();
}

// The start is over once nothing is waited for.
void Fleet::note_start() {
  if (!started_ && !desired_.models.empty()) {
    std::vector<std::pair<std::string, Standing>> all;
    for (const auto& [name, model] : desired_.models) all.emplace_back(name, standing_of(name, model));
    if (std::ranges::any_of(all, [](const auto& one) { return one.second.kind == Standing::waits; })) return;
    started_ = true;
    if (std::ranges::all_of(all, [](const auto& one) { return one.second.kind == Standing::failed; }) && hopeless_) {
      const auto failed =
          std::ranges::find(held_, ResidentPhase::failed, [](const auto& held) { return held->as.phase; });
      const Error why = failed != held_.end() ? (*failed)->failure : Error{Code::host, all.front().second.why};
      return hopeless_(all.size() == 1 ? why : Error{why.code, all.front().first + ": " + why.text});
    }
  }
  for (const std::string& warning : std::exchange(warnings_, {})) say_(warning);
}

void Fleet::when_settled(std::string model, std::string version, Outcome outcome) {
  waiters_.push_back({std::move(model), std::move(version), std::move(outcome)});
  schedule();
}

void Fleet::tell_waiters() {
  std::vector<std::pair<Outcome, Status>> told;
  std::erase_if(waiters_, [&](Waiter& waiter) {
    auto outcome = outcome_of(waiter.model, waiter.version);
    if (!outcome) return false;
    told.emplace_back(std::move(waiter.outcome), *std::move(outcome));
    return true;
  });
  for (const auto& [tell, outcome] : told) tell(outcome);
}

// --- requests ------------------------------------------------------------------------------------------------------

std::string_view Fleet::real_name(std::string_view name) const {
  const auto alias = desired_.aliases.find(name);
  return alias != desired_.aliases.end() ? std::string_view(alias->second) : name;
}

Result<ServedModel*> Fleet::choose(std::string_view name, std::string_view version, std::string_view key) {
  auto chosen = models_.choose(real_name(name), version, key);
  return chosen ? chosen : why_not_there(name, version, chosen.error());
}

Result<ServedModel*> Fleet::find(std::string_view name, std::string_view version) const {
  auto found = models_.find(real_name(name), version);
  if (found) return found;
  const auto model = desired_.models.find(real_name(name));
  const auto named =
      model != desired_.models.end() && !version.empty() ? version_named(model->second, version) : nullptr;
  ServedModel* const sleeper = sleepers_.find(real_name(name), named != nullptr ? *named : version);
  return sleeper != nullptr ? Result<ServedModel*>(sleeper) : why_not_there(name, version, found.error());
}

Error Fleet::unknown(std::string_view name) const { return models_.unknown(name); }

// It may be known, and not in memory.
Error Fleet::why_not_there(std::string_view asked, std::string_view version, Error unknown) const {
  const std::string name(real_name(asked));
  const auto model = desired_.models.find(name);
  if (model == desired_.models.end()) return unknown;
  const auto named = version.empty() ? Result<std::string>("") : resolve(name, model->second, version);
  if (!named) return unknown;
  for (const auto& held : held_)
    if (held->as.model == name && held->as.phase == ResidentPhase::failed &&
        (version.empty() || held->as.version == *named))
      return {Code::unavailable, called(name, held->as.version) + " could not be loaded: " + held->failure.text};
  for (const auto& [which, why] : refused_)
    if (which.first == name && version.empty())
      return {Code::unavailable, called(name, which.second) + " is not in memory: " + why};
  if (version.empty()) return {Code::unavailable, "model '" + name + "' has no version in memory"};
  if (const auto refused = refused_.find({name, *named}); refused != refused_.end())
    return {Code::unavailable, called(name, *named) + " is not in memory: " + refused->second};
  return {Code::unavailable, called(name, *named) + " is not in memory: give it a label, or `keep` more versions"};
}

}  // namespace mctl
