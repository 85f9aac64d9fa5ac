// The desired state: which models and versions the server is to have, and where their requests go.
//
// It is one JSON document, `mctl.state/1`. Whoever changes something (a file, a folder, a person, a rollout) changes
// this, through change.h; reconcile.h makes the server have it; store.h keeps it over a kill -9.
//
//   {"schema": "mctl.state/1",
//    "models": {"scorer": {
//      "versions": {"3": {"bundle": "models/scorer/3/bundle.pt2", "digest": "…", "settings": {"instances": 1}},
//                   "4": {"bundle": "models/scorer/4/bundle.pt2"}},
//      "labels":   {"stable": "3", "canary": "4"},
//      "traffic":  {"stable": 95, "canary": 5},
//      "shadow":   {"version": "4", "percent": 10},
//      "rollout":  {"version": "4", "steps": [1, 10, 50, 100], "hold_s": 60, "min_requests": 200,
//                   "gates": {"errors": 0.001, "p99": 1.2, "mismatch": 0.001}},
//      "previous": "2",
//      "keep":     1,
//      "settings": {"threads": 2}}},
//    "aliases": {"org/scorer": "scorer"}}
//
// Only `versions` and, of a version, `bundle` have to be there. `traffic` is percent by label or version and adds up to
// 100; without it, all requests go to the highest version that is ready. `previous` is where `stable` pointed before:
// `rollback` goes there. `keep` versions stay in memory beside those that are used (reconcile.h). An alias is one more
// name of a model, which may have slashes. Of a rollout, `from`, `phase`, `step`, `reason` and `evidence` are the
// server's record (rollout.h).
//
// Names of models, versions and labels have letters, digits, `_`, `.` and `-`, and at most 256 of them. A label is no
// number, and not the name of a version of its model, so that a name in a request means one thing.
#pragma once

#include <boost/json.hpp>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "format/result.h"
#include "registry/settings.h"

namespace mctl {

constexpr std::string_view kStateSchema = "mctl.state/1";
constexpr std::size_t kMaxState = 64 << 20;  // bytes

// Runs of digits are compared as numbers, and come after all else: 9 < 10, 1.9 < 1.10, beta < 1.
struct VersionLess {
  using is_transparent = void;
  bool operator()(std::string_view one, std::string_view other) const;
};

struct VersionState {
  std::string bundle;  // path
  std::string digest;  // of the manifest, SHA-256 in hex; empty: not known yet
  SettingsLayer settings;
  bool operator==(const VersionState&) const = default;
};

struct Shadowing {
  std::string version;        // or label
  std::int64_t percent = 10;  // of the requests are copied
  bool operator==(const Shadowing&) const = default;
};

// What a new version must not do. Empty: not looked at.
struct Gates {
  std::optional<double> errors;    // the share of its requests that fail, 0.001 is 0.1 %
  std::optional<double> p99;       // its compute time as a multiple of the old version's
  std::optional<double> mismatch;  // the share of shadowed requests whose outputs differ
  bool operator==(const Gates&) const = default;
};

enum class RolloutPhase : std::uint8_t { loading, shadow, step, promoted, taken_back };
std::string_view name_of(RolloutPhase phase);

struct Rollout {
  std::string version;                                 // the new one
  std::vector<std::int64_t> steps = {1, 10, 50, 100};  // percent
  std::int64_t hold_s = 60, min_requests = 200;        // of each step, at least
  Gates gates;
  // The record of how it goes:
  std::string from;  // the old version
  RolloutPhase phase = RolloutPhase::loading;
  std::int64_t step = 0;  // of `steps`, from 0
  std::string reason;     // why it was taken back
  boost::json::object evidence;

  bool runs() const { return phase < RolloutPhase::promoted; }
  bool last_step() const { return step + 1 == static_cast<std::int64_t>(steps.size()); }
  bool operator==(const Rollout&) const = default;
};

struct ModelState {
  std::map<std::string, VersionState, VersionLess> versions;
  std::map<std::string, std::string, std::less<>> labels;    // to versions
  std::map<std::string, std::int64_t, std::less<>> traffic;  // of labels or versions, percent
  std::optional<Shadowing> shadow;
  std::optional<Rollout> rollout;
  std::string previous;  // empty: none
  std::int64_t keep = 1;
  SettingsLayer settings;

  bool rolls() const { return rollout && rollout->runs(); }
  bool operator==(const ModelState&) const = default;
};

struct DesiredState {
  std::map<std::string, ModelState, std::less<>> models;
  std::map<std::string, std::string, std::less<>> aliases;
  bool operator==(const DesiredState&) const = default;
};

// The version that a label or a version's own name means; nullptr: neither.
const std::string* version_named(const ModelState& model, std::string_view name);
// Of a request's name for the model: itself, or what the alias stands for; nullptr: not known.
const ModelState* model_named(const DesiredState& state, std::string_view name);

// A file: Code::usage, with the line, the place and what is allowed. What the server keeps of a rollout may be there.
Result<DesiredState> parse_state(std::string_view text);

// One model, as it stands in the document; a fault begins with its place. Nothing is looked up yet: check_model does.
ModelState model_from_json(const boost::json::value& value, const std::string& where, std::string& fault);
void check_model(const std::string& name, const ModelState& model, std::string& fault);
void check_aliases(const DesiredState& state, std::string& fault);
std::map<std::string, std::string, std::less<>> aliases_from_json(const boost::json::value& value, std::string& fault);

boost::json::object model_to_json(const ModelState& model);
boost::json::object state_to_json(const DesiredState& state);
// For people and files: short values on one line, equal states are equal texts.
std::string print_state(const DesiredState& state);

// Of a printed state, for If-Match (RFC 9110): quotes and 32 hexadecimal digits.
std::string etag_of(std::string_view printed);
// Code::outdated if the header names other states only. Empty: whoever asks does not mind.
Status check_if_match(std::string_view header, std::string_view etag);

}  // namespace mctl
