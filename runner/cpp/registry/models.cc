#include "registry/models.h"

#include <algorithm>

#include "registry/state.h"

namespace mctl {
namespace {

constexpr std::size_t kMostListed = 5;  // names in an error

bool before(const ServedModel& one, const ServedModel& other) {
  return one.name() != other.name() ? one.name() < other.name() : VersionLess()(one.version(), other.version());
}

std::string list_of(const std::vector<std::string_view>& names) {
  std::string text;
  for (std::size_t i = 0; i < std::min(names.size(), kMostListed); ++i) {
    text += (i ? ", '" : "'") + std::string(names[i]) + "'";
  }
  return text + (names.size() > kMostListed ? ", … (" + std::to_string(names.size()) + " in all)" : "");
}

}  // namespace

Status Models::add(std::shared_ptr<ServedModel> model) {
  const auto less = [](const auto& one, const auto& other) { return before(*one, *other); };
  const auto place = std::ranges::lower_bound(all_, model, less);
  if (place != all_.end() && !before(*model, **place)) {
    return Error{Code::usage, "model '" + model->name() + "', version '" + model->version() + "' is given twice"};
  }
  all_.insert(place, std::move(model));
  by_name_.clear();
  for (std::size_t i = 0; i < all_.size(); ++i) {
    Range& range = by_name_.try_emplace(all_[i]->name(), Range{i, 0}).first->second;
    ++range.count;
  }
  return Done{};
}

std::span<const std::shared_ptr<ServedModel>> Models::versions(std::string_view name) const {
  const auto found = by_name_.find(name);
  if (found == by_name_.end()) return {};
  return std::span(all_).subspan(found->second.begin, found->second.count);
}

Error Models::unknown(std::string_view name) const {
  std::vector<std::string_view> names;
  for (const auto& [known, range] : by_name_) names.push_back(known);
  return {Code::not_found, "model '" + std::string(name) + "' is not here: this server has " + list_of(names)};
}

Result<ServedModel*> Models::find(std::string_view name, std::string_view version) const {
  const auto found = versions(name);
  if (found.empty()) return unknown(name);
  if (version.empty()) {
    for (std::size_t i = found.size(); i-- > 0;) {
      if (found[i]->ready()) return found[i].get();
    }
    return found.back().get();
  }
  std::vector<std::string_view> known;
  for (const auto& model : found) {
    if (model->version() == version) return model.get();
    known.push_back(model->version());
  }
  return Error{Code::not_found, "model '" + std::string(name) + "' has no version '" + std::string(version) +
                                    "': it has " + list_of(known)};
}

Status Models::ready() const {
  for (const auto& model : all_) {
    if (auto status = model->ready(); !status) {
      return all_.size() == 1 ? status.error() : Error{Code::unavailable, model->name() + ": " + status.error().text};
    }
  }
  return Done{};
}

bool Models::idle() const {
  return std::ranges::all_of(all_, [](const auto& model) { return model->idle(); });
}

void Models::drain() {
  for (const auto& model : all_) model->drain();
}

}  // namespace mctl
