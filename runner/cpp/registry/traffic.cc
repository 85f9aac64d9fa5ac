#include "registry/traffic.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "format/text.h"

namespace mctl {
namespace {

using Weights = std::map<std::string, std::int64_t, VersionLess>;

// What is asked for, whoever can answer; empty: the highest that can.
Weights weights_of(const ModelState& model) {
  Weights weights;
  for (const auto& [name, percent] : model.traffic)
    if (const std::string* version = version_named(model, name); version != nullptr && percent > 0)
      weights[*version] += percent;
  if (!model.rolls() || model.rollout->phase != RolloutPhase::step) return weights;
  const std::int64_t percent = model.rollout->steps[static_cast<std::size_t>(model.rollout->step)];
  weights = {{model.rollout->version, percent}};
  if (percent < 100) weights[model.rollout->from] = 100 - percent;
  return weights;
}

// Whole percents that add up to 100: rounded down, and the largest rests rounded up.
std::vector<Share> shares_from(const Weights& weights) {
  std::int64_t sum = 0;
  for (const auto& [version, weight] : weights) sum += weight;
  std::vector<Share> shares;
  if (sum == 0) return shares;
  std::vector<std::pair<std::int64_t, std::size_t>> rests;
  std::int64_t missing = 100;
  for (const auto& [version, weight] : weights) {
    shares.push_back({version, weight * 100 / sum});
    rests.emplace_back(-(weight * 100 % sum), rests.size());
    missing -= shares.back().percent;
  }
  std::ranges::sort(rests);
  for (std::int64_t i = 0; i < missing; ++i) ++shares[rests[static_cast<std::size_t>(i)].second].percent;
  return shares;
}

// FNV-1a, then the finish of SplitMix64, so that each bit depends on each byte.
std::uint64_t hash_of(std::string_view version, std::string_view key) {
  std::uint64_t hash = 0xcbf29ce484222325;
  const auto add = [&](unsigned char byte) { hash = (hash ^ byte) * 0x100000001b3; };
  for (const char c : version) add(static_cast<unsigned char>(c));
  add(0);
  for (const char c : key) add(static_cast<unsigned char>(c));
  hash = (hash ^ hash >> 30) * 0xbf58476d1ce4e5b9;
  hash = (hash ^ hash >> 27) * 0x94d049bb133111eb;
  return hash ^ hash >> 31;
}

// Of this key for this version; the version with the largest one has it.
double claim(const Share& share, std::string_view key) {
  const double unit = (static_cast<double>(hash_of(share.version, key) >> 11) + 0.5) * 0x1p-53;
  return -static_cast<double>(share.percent) / std::log(unit);
}

}  // namespace

std::vector<std::string> wanted_versions(const ModelState& model) {
  std::vector<std::string> versions;
  for (const auto& [version, weight] : weights_of(model)) versions.push_back(version);
  return versions;
}

std::vector<Share> shares_of(const ModelState& model, const CanAnswer& can_answer, const std::vector<Share>& before) {
  Weights weights = weights_of(model);
  if (weights.empty()) {
    for (const auto& [version, state] : model.versions)
      if (can_answer(version)) weights = {{version, 100}};  // the highest is the last
  }
  std::erase_if(weights, [&](const auto& weight) { return !can_answer(weight.first); });
  if (weights.empty())
    for (const Share& share : before)
      if (can_answer(share.version)) weights[share.version] = share.percent;
  return shares_from(weights);
}

std::optional<Shadowing> shadow_of(const ModelState& model) {
  if (!model.rolls() || !model.rollout->gates.mismatch) return model.shadow;
  return Shadowing{model.rollout->version, model.shadow ? model.shadow->percent : 100};
}

Schedule::Schedule(std::vector<std::int64_t> percents) : percents_(std::move(percents)), had_(percents_.size()) {}

// Of those whose debt is large enough, the one that has to come soonest: with `parts` = 2 (n - 1), a version may come
// once percent * t - had >= 1 / parts, and comes by the time (1 - 1 / parts + had) / percent. Everything is in
// hundredths, and in parts of them, so that it is exact.
std::size_t Schedule::next() {
  const std::int64_t parts = std::max<std::int64_t>(2 * static_cast<std::int64_t>(percents_.size()) - 2, 1);
  ++requests_;
  std::size_t best = percents_.size();
  const auto due = [&](std::size_t i) { return (100 * parts - 100) + 100 * parts * had_[i]; };
  for (std::size_t i = 0; i < percents_.size(); ++i) {
    const bool may = parts * (percents_[i] * requests_ - 100 * had_[i]) >= 100;
    if (may && (best == percents_.size() || due(i) * percents_[best] < due(best) * percents_[i])) best = i;
  }
  ++had_[best];
  if (requests_ == 100) {
    std::ranges::fill(had_, 0);
    requests_ = 0;
  }
  return best;
}

void Traffic::set(std::vector<Share> shares) {
  if (shares == shares_) return;
  shares_ = std::move(shares);
  schedule_.reset();
  if (shares_.size() < 2) return;
  std::vector<std::int64_t> percents;
  for (const Share& share : shares_) percents.push_back(share.percent);
  schedule_.emplace(std::move(percents));
}

const std::string* Traffic::next() {
  if (shares_.empty()) return nullptr;
  return &shares_[schedule_ ? schedule_->next() : 0].version;
}

const std::string* Traffic::of_key(std::string_view key) const {
  if (shares_.empty()) return nullptr;
  return &std::ranges::max_element(shares_, {}, [&](const Share& share) { return claim(share, key); })->version;
}

Result<std::string> resolve(const std::string& model_name, const ModelState& model, std::string_view version) {
  if (const std::string* found = version_named(model, version)) return *found;
  std::string there;
  for (const auto& [name, state] : model.versions) there += (there.empty() ? "`" : ", `") + name + '`';
  for (const auto& [label, target] : model.labels) there += (there.empty() ? "`" : ", `") + label + '`';
  return Error{Code::not_found,
               printable("model `" + model_name + "` has no version or label `" + std::string(version.substr(0, 256)) +
                         "`" + (there.empty() ? "" : ", but " + there))};
}

}  // namespace mctl
