#include "registry/models.h"

#include <algorithm>

#include "format/text.h"

namespace mctl {
namespace {

constexpr std::size_t kMostListed = 5;      // names in an error
constexpr std::size_t kLongestNamed = 256;  // bytes of what a client sent

std::string list_of(const std::vector<std::string_view>& names) {
  std::string text;
  for (std::size_t i = 0; i < std::min(names.size(), kMostListed); ++i) {
    text += (i ? ", '" : "'") + std::string(names[i]) + "'";
  }
  return text + (names.size() > kMostListed ? ", … (" + std::to_string(names.size()) + " in all)" : "");
}

std::string quoted(std::string_view name) { return "'" + printable(name.substr(0, kLongestNamed)) + "'"; }

}  // namespace

ServedModel* Models::Named::version(std::string_view name) const {
  auto found = versions.find(name);
  if (found == versions.end()) {
    const auto label = labels.find(name);
    if (label != labels.end()) found = versions.find(label->second);
  }
  return found != versions.end() ? found->second.get() : nullptr;
}

ServedModel* Models::Named::highest() const {
  for (auto one = versions.rbegin(); one != versions.rend(); ++one)
    if (one->second->ready()) return one->second.get();
  return versions.rbegin()->second.get();
}

ServedModel* Models::Named::awaited() const {
  if (!directed) return highest();
  if (!last.empty())
    if (ServedModel* const model = version(std::ranges::max_element(last, {}, &Share::percent)->version)) return model;
  for (auto one = versions.rbegin(); one != versions.rend(); ++one)
    if (!one->second->ready()) return one->second.get();
  return nullptr;
}

void Models::put(std::shared_ptr<ServedModel> model) {
  named_[model->name()].versions[model->version()] = std::move(model);
}

void Models::remove(const ServedModel& model) {
  const auto named = named_.find(model.name());
  if (named == named_.end()) return;
  auto& versions = named->second.versions;
  const auto found = versions.find(model.version());
  if (found != versions.end() && found->second.get() == &model) versions.erase(found);
  if (versions.empty()) named_.erase(named);
}

void Models::direct(const std::string& name, std::vector<Share> shares, Labels labels) {
  const auto named = named_.find(name);
  if (named == named_.end()) return;
  Named& its = named->second;
  if (!shares.empty()) its.last = shares;
  its.traffic.set(std::move(shares));
  its.labels = std::move(labels);
  its.directed = true;
}

const std::vector<Share>& Models::shares(std::string_view name) const {
  static const std::vector<Share> none;
  const auto named = named_.find(name);
  return named != named_.end() ? named->second.traffic.shares() : none;
}

const std::vector<Share>& Models::last_shares(std::string_view name) const {
  static const std::vector<Share> none;
  const auto named = named_.find(name);
  return named != named_.end() ? named->second.last : none;
}

Result<ServedModel*> Models::choose(std::string_view name, std::string_view version, std::string_view key) {
  if (!version.empty()) return find(name, version);
  const auto named = named_.find(name);
  if (named == named_.end()) return unknown(name);
  Traffic& traffic = named->second.traffic;
  const std::string* chosen = key.empty() ? traffic.next() : traffic.of_key(key);
  ServedModel* const model = chosen != nullptr ? named->second.version(*chosen) : nullptr;
  if (model != nullptr) return model;
  if (ServedModel* const awaited = named->second.awaited()) return awaited;
  return Error{Code::unavailable, "model " + quoted(name) + ": no version that has traffic is in memory"};
}

Result<ServedModel*> Models::find(std::string_view name, std::string_view version) const {
  const auto found = named_.find(name);
  if (found == named_.end()) return unknown(name);
  const Named& named = found->second;
  const auto& shares = named.traffic.shares();
  if (version.empty() && shares.empty()) return named.highest();
  if (ServedModel* const model =
          named.version(!version.empty() ? version : std::ranges::max_element(shares, {}, &Share::percent)->version))
    return model;
  if (version.empty()) return named.highest();
  std::vector<std::string_view> known;
  for (const auto& [each, model] : named.versions) known.push_back(each);
  return Error{Code::not_found,
               "model " + quoted(name) + " has no version " + quoted(version) + ": it has " + list_of(known)};
}

Error Models::unknown(std::string_view name) const {
  std::vector<std::string_view> names;
  for (const auto& [known, named] : named_) names.push_back(known);
  return {Code::not_found, "model " + quoted(name) + " is not here: " +
                               (names.empty() ? "this server has none" : "this server has " + list_of(names))};
}

std::vector<std::shared_ptr<ServedModel>> Models::versions(std::string_view name) const {
  std::vector<std::shared_ptr<ServedModel>> versions;
  const auto named = named_.find(name);
  if (named == named_.end()) return versions;
  for (const auto& [version, model] : named->second.versions) versions.push_back(model);
  return versions;
}

std::vector<std::shared_ptr<ServedModel>> Models::all() const {
  std::vector<std::shared_ptr<ServedModel>> all;
  for (const auto& [name, named] : named_)
    for (const auto& [version, model] : named.versions) all.push_back(model);
  return all;
}

}  // namespace mctl
