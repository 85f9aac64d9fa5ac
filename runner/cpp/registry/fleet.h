// The models of a server: what is desired (state.h), what is in memory, and the steps from one to the other
// (reconcile.h), taken whenever either has changed. One thread, no locks.
#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/steady_timer.hpp>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/served_model.h"
#include "format/result.h"
#include "pool/guard.h"
#include "pool/reaper.h"
#include "registry/change.h"
#include "registry/events.h"
#include "registry/models.h"
#include "registry/reconcile.h"
#include "registry/sleepers.h"
#include "registry/state.h"
#include "registry/store.h"

namespace mctl {

struct FleetSettings {
  ModelSettings flags;  // of a model that says nothing else
  Runtime runtime;
  bool null = false;
  Owner owner = Owner::state;
  bool ready_all = false;                    // ready only while every model can answer; else while one can
  std::optional<std::int64_t> max_resident;  // models in memory at a time
};

// What there is to be served, as its owner has it: a folder, a file, or bundles on the command line.
struct Owned {
  DesiredState state;
  std::map<std::string, SettingsLayer, std::less<>> layers;  // of serve.toml, by model
  std::vector<std::string> left_out;                         // what cannot be served at all, and why
  std::map<std::string, std::int64_t> touched_ns;            // when a bundle's file was changed last, if that is known
  bool operator==(const Owned&) const = default;
};

// What models' handlers need of a door.
struct HandlerHooks {
  std::function<Status(const ServedModel&)> check = {};  // of a model that is ready: may it have these routes?
  std::function<ServedHandler::Cancel(ServedModel&, const CallOrigin&, HandlerCall&, const Caller&)> called = {};
};

class Fleet {
 public:
  using Say = std::function<void(const std::string&)>;
  using Outcome = std::function<void(const Status&)>;

  Fleet(boost::asio::io_context& io, Reaper& reaper, FleetSettings settings, Say say);

  // What is to be kept over the end of the server goes to `store`. `now` is what the owner has; a state that was kept
  // is completed by it.
  Status prepare(Owned now, std::optional<StateStore> store);
  void direct_handlers(HandlerHooks hooks) { handlers_ = std::move(hooks); }  // before it begins
  // `hopeless`: at the start no model could be loaded; with the reason of the first.
  void begin(std::function<void(const Error&)> hopeless);
  void adopt(Owned now);  // the owner has changed
  void drain();           // for good
  bool idle() const;      // nothing is asked of a model
  // What could not be loaded is tried again: of one model, or of all.
  void forget_failures(std::string_view model = {});

  // The only way to change what is desired: checked, kept, applied, told. The reason why not is for the client.
  Status change(const boost::json::value& patch, std::string_view by, ChangedBy who = ChangedBy::person);
  // What a rollout comes to: it holds even if it cannot be kept.
  void change_by_server(const boost::json::value& patch, std::string_view by);
  const DesiredState& desired() const { return desired_; }
  Owner owner() const { return settings_.owner; }
  const std::string& etag() const { return etag_; }

  // Tells when a version is ready, could not be loaded, or is not to be in memory at all.
  void when_settled(std::string model, std::string version, Outcome outcome);

  // The versions that such a request may go to and that are in memory only on demand: those that are not there are
  // loaded, and `then` is called once each is ready, or is known not to get so. False: nothing has to be waited for.
  bool wake(std::string_view name, std::string_view version, std::function<void()> then);
  // Would it have to be waited for?
  bool sleeps(std::string_view name, std::string_view version) const { return !asleep(name, version).empty(); }
  // For one inference request.
  Result<ServedModel*> choose(std::string_view name, std::string_view version, std::string_view key);
  // The version that a request is to be tried on too, now that another one has answered it; nullptr: none.
  ServedModel* shadow_for(const ServedModel& answered);
  // To look at.
  Result<ServedModel*> find(std::string_view name, std::string_view version = {}) const;
  const Models& models() const { return models_; }
  // These, and those that are in memory only on demand: by name, then version.
  std::vector<std::shared_ptr<ServedModel>> known() const;
  bool knows(std::string_view name, std::string_view version) const;  // is it one, or a label?
  bool is_asleep(const std::string& name, const std::string& version) const { return sleepers_.has({name, version}); }
  bool has_on_demand() const { return on_demand_; }
  Error unknown(std::string_view name) const;  // says which models there are
  Events& events() { return events_; }

  Status ready() const;                                                 // of the server
  Status ready(std::string_view name, std::string_view version) const;  // of one model

  // A version that is in memory, on its way there, or could not be loaded.
  struct Held {
    Resident as;
    std::shared_ptr<ServedModel> model;  // none: it could not be loaded
    Error failure;
    bool on_demand() const { return as.settings.load == LoadWhen::on_demand; }
  };
  const std::vector<std::unique_ptr<Held>>& held() const { return held_; }
  SettingsLayer settings_of(const std::string& model, const std::string& version) const;

 private:
  struct Waiter {
    std::string model, version;
    Outcome outcome;
  };

  // Requests that wait for versions which were not in memory.
  struct Wake {
    std::vector<ModelVersion> versions;
    std::function<void()> then;
  };

  // Of a model as a whole.
  struct Standing {
    enum Kind { answers, waits, failed } kind;
    std::string why;
  };

  Status keep(const DesiredState& after);
  void apply(DesiredState after, std::string_view by);
  void schedule();
  void reconcile();
  Actual actual();
  bool take(const Step& step);
  void load(const Step& step);
  Result<std::shared_ptr<ServedModel>> open(const ModelVersion& which, const Sleepers::Source& source);
  Sleepers::Source source_of(const ModelVersion& which) const;
  Held& hold(const ModelVersion& which, const Sleepers::Source& source);
  void start(Held& held);
  void switch_over(Held& held);
  void unload(std::uint64_t id, const std::string& why);
  Held* held_by(std::uint64_t id);
  void on_changed(std::uint64_t id);
  void on_failed(std::uint64_t id, const Error& error);
  void direct();
  void direct_shadow(const std::string& name, const ModelState& model);
  void stop_serving(Held& held);
  void fail(Held& held, const Error& error);
  std::optional<Status> fate_of(const std::string& model, const std::string& version) const;
  std::optional<Status> outcome_of(const std::string& model, const std::string& version) const;
  bool answers(std::string_view name) const;
  Standing standing_of(const std::string& name, const ModelState& model) const;
  Needed needed_of(const std::string& name, const ModelState& model) const;
  void tell_waiters();
  // on_demand.cc
  void put_to_sleep();
  void note_needs(Actual& actual);
  void note_asked(Actual& actual) const;
  std::vector<ModelVersion> asleep(std::string_view name, std::string_view version) const;
  std::vector<std::string> wanted_of(const std::string& name, std::string_view version) const;
  void mark_used(std::string_view name);
  void tell_woken();
  bool comes_and_goes() const;  // something may have to be unloaded, or loaded, as time goes by
  void note_start();
  void look_again_soon();
  Error why_not_there(std::string_view name, std::string_view version, Error unknown) const;
  std::string_view real_name(std::string_view name) const;

  boost::asio::io_context& io_;
  Reaper& reaper_;
  const FleetSettings settings_;
  const Say say_;
  HandlerHooks handlers_;
  std::optional<StateStore> store_;
  Owned owned_;
  DesiredState desired_;
  std::string etag_;
  std::vector<std::unique_ptr<Held>> held_;
  std::vector<std::shared_ptr<ServedModel>> leaving_;  // failed: may be in the middle of telling so
  std::map<ModelVersion, std::string> refused_;
  Sleepers sleepers_;
  std::vector<Wake> wakes_;
  std::map<std::string, std::int64_t, std::less<>> needs_;  // bytes, by bundle: what it took, or is thought to take
  bool on_demand_ = false;                                  // some version is
  std::uint64_t next_id_ = 1;
  struct ShadowTurn {
    Shadowing shadow;
    std::optional<Schedule> schedule;  // none: all requests
  };
  std::map<std::string, ShadowTurn, std::less<>> shadows_;  // by model
  Models models_;
  Events events_;
  std::vector<Waiter> waiters_;
  std::vector<std::string> warnings_;  // to be said when it is clear that the server goes on
  std::function<void(const Error&)> hopeless_;
  boost::asio::steady_timer timer_;
  bool began_ = false, started_ = false, draining_ = false, scheduled_ = false, looks_ = false;
  const Guard guard_;
};

}  // namespace mctl
