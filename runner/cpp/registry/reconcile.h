// From what is in memory to what is desired: the steps that can be taken now.
//
// The server calls `next_steps` whenever something has changed (the state, a load that ended, the last call of a
// version that drains, a request for a model that is not in memory, a second that went by), takes the steps, and calls
// it again. Nothing is remembered between calls, so a server that starts again goes on where it was.
//
// Which versions are to be in memory:
// 1. A version is used if traffic, a label, a shadow or a rollout names it; without traffic, the highest that has not
//    failed to load is. A rollout that was taken back keeps its version, for inspection.
// 2. Beside these, `keep` versions stay: first `previous`, then the highest. They are what a rollback needs.
// 3. An on_demand version is in memory only from when it is asked for until it has been idle for `idle_unload_s`.
//
// In which order:
// 4. A version whose bundle or settings have changed is loaded anew beside the old one, which answers until the new one
//    is ready; then requests are switched over, and the old one drains and goes.
// 5. What requests go to is not taken away: `routed` (traffic.h) moves first. What is not used any more drains, and is
//    unloaded when its last call was answered.
// 6. What failed to load stays as a note with its reason. It is tried again when its bundle or its settings change, or
//    when the server drops the note.
// 7. What is asked for is loaded first, then what is used, then what is kept; `loads_at_once` at a time.
// 8. A load has to fit: its bytes into what is free, and one more into `max_resident`. For it, on_demand versions
//    without calls that nobody asks for are unloaded, the least recently used first, if that makes it fit. If not, it
//    waits while a busy on_demand version, or one that drains, may still make room, and is refused otherwise, with both
//    numbers. Either is found anew at each call.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "registry/settings.h"
#include "registry/state.h"

namespace mctl {

enum class ResidentPhase : std::uint8_t { loading, ready, draining, failed };

// One bundle in memory, on its way in or out, or the note that it could not be loaded.
struct Resident {
  std::uint64_t id = 0;  // the server's own
  std::string model, version, bundle, digest;
  SettingsLayer settings;  // resolved, as it was loaded with
  ResidentPhase phase = ResidentPhase::loading;
  bool serving = false;      // requests for its version go to it
  bool routed = false;       // and those that name no version may
  std::int64_t calls = 0;    // that wait, run, or are being answered
  std::int64_t bytes = 0;    // that it takes
  std::int64_t used_ms = 0;  // when it was last asked for
};

using ModelVersion = std::pair<std::string, std::string>;

struct Actual {
  std::vector<Resident> residents;
  std::set<ModelVersion> asked;                            // on_demand versions that requests wait for
  std::map<std::string, std::int64_t, std::less<>> needs;  // bytes, by bundle; not there: not known, and let in
  std::optional<std::int64_t> free_bytes;                  // empty: not known
  std::optional<std::int64_t> max_resident;
  std::int64_t loads_at_once = 1;
  std::int64_t now_ms = 0;  // of a clock that does not jump
};

// The settings that hold for a version (`resolved` of all layers).
using SettingsOf = std::function<SettingsLayer(const std::string& model, const std::string& version)>;

struct Step {
  enum class Kind : std::uint8_t { load, switch_over, drain, unload, wait, refuse };
  Kind kind;
  std::string model, version;
  std::uint64_t resident = 0;  // of load, wait and refuse: none yet
  std::string why;
  bool operator==(const Step&) const = default;
};

std::vector<Step> next_steps(const DesiredState& desired, const Actual& actual, const SettingsOf& settings_of);

// Rules 1 and 2: used ones first, then kept ones. `failed`: it could not be loaded.
struct Needed {
  std::vector<std::string> used, kept;
};
Needed needed_versions(const ModelState& model, const std::function<bool(const std::string& version)>& failed);

// How many workers a version is to have, between the ends of its range: one more while requests have waited for
// `kCrowdedMs` and a core is free, one less after `kQuietMs` in which one worker had nothing to do.
struct Crowd {
  std::int64_t instances = 1;   // now
  std::int64_t waiting_ms = 0;  // for how long requests have waited without a break
  std::int64_t spare_ms = 0;    // for how long one worker has had nothing to do
  std::int64_t free_cores = 0;
};
constexpr std::int64_t kCrowdedMs = 500, kQuietMs = 60'000;
std::int64_t instances_for(const InstanceRange& range, const Crowd& crowd);

}  // namespace mctl
