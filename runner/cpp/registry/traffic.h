// Which version answers a request that names none: exact, not drawn.
//
// Shares. What `traffic` says, by version; a rollout in a step gives its new version the step's percent and the old one
// the rest; without `traffic`, the highest version that can answer has everything. A version that cannot answer now (it
// loads, it has failed, its workers are gone) has no share: its requests go to the other versions that have one, in
// proportion. A version without a share never gets a request that does not name it. An on-demand version that is not in
// memory is loaded before the request that asks for it is counted (fleet.h). While no version with a share can answer,
// those that answered before go on: a new version is ready before the old one loses a request.
//
// Schedule. Requests are counted out so that after any number of them each version has had its share of them to within
// one (Tijdeman, "The chairman assignment problem", Discrete Mathematics 32, 1980). Shares are whole percents, so the
// order repeats after 100: of any 100 requests in a row each version gets its share exactly.
//
// Keys. A request with a key goes where the key's hash says: the version with the largest -share / ln(u), where u in
// (0, 1) is the hash of key and version (weighted rendezvous hashing: Schindelhauer and Schomaker, "Weighted
// distributed hash tables", 2005). A user stays on one version. When shares change, users move only to versions whose
// share has grown against the one that they leave: with two versions, as many as weights move. When a version cannot
// answer, only its users go elsewhere.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "format/result.h"
#include "registry/state.h"

namespace mctl {

struct Share {
  std::string version;
  std::int64_t percent = 0;  // more than 0
  bool operator==(const Share&) const = default;
};

using CanAnswer = std::function<bool(const std::string& version)>;

// The versions that traffic is for, whoever can answer; empty: the highest that can.
std::vector<std::string> wanted_versions(const ModelState& model);

// In numeric order of the versions; they add up to 100, or there are none. `before`: the shares until now.
std::vector<Share> shares_of(const ModelState& model, const CanAnswer& can_answer,
                             const std::vector<Share>& before = {});

// The shadow that holds now: a rollout with a mismatch gate shadows its new version.
std::optional<Shadowing> shadow_of(const ModelState& model);

// Counts requests out among shares that add up to 100.
class Schedule {
 public:
  explicit Schedule(std::vector<std::int64_t> percents);
  std::size_t next();

 private:
  std::vector<std::int64_t> percents_, had_;
  std::int64_t requests_ = 0;  // of this hundred
};

// A model's traffic as it is now. It is made anew when the state or what can answer changes; `set` keeps the place in
// the order if shares are still the same.
class Traffic {
 public:
  void set(std::vector<Share> shares);
  const std::vector<Share>& shares() const { return shares_; }

  // nullptr: no version with a share can answer.
  const std::string* next();
  const std::string* of_key(std::string_view key) const;

 private:
  std::vector<Share> shares_;
  std::optional<Schedule> schedule_;
};

// The version that a request names, by itself or by a label. Code::not_found tells what there is.
Result<std::string> resolve(const std::string& model_name, const ModelState& model, std::string_view version);

}  // namespace mctl
