#include "registry/sleepers.h"

#include <utility>

namespace mctl {

bool Sleepers::has(const ModelVersion& which, const Source& source) const {
  const auto found = sleepers_.find(which);
  return found != sleepers_.end() && found->second.source == source;
}

void Sleepers::put(const ModelVersion& which, Source source, std::shared_ptr<ServedModel> model) {
  sleepers_.insert_or_assign(which, Sleeper{std::move(source), std::move(model)});
}

std::shared_ptr<ServedModel> Sleepers::take(const ModelVersion& which, const Source& source) {
  if (!has(which, source)) return nullptr;
  auto model = std::move(sleepers_.at(which).model);
  sleepers_.erase(which);
  return model;
}

ServedModel* Sleepers::find(std::string_view name, std::string_view version) const {
  ServedModel* found = nullptr;
  for (const auto& [which, sleeper] : sleepers_) {
    if (which.first != name) continue;
    if (version.empty() ? found == nullptr || VersionLess()(found->version(), which.second) : which.second == version)
      found = sleeper.model.get();
  }
  return found;
}

std::vector<std::shared_ptr<ServedModel>> Sleepers::all() const {
  std::vector<std::shared_ptr<ServedModel>> all;
  for (const auto& [which, sleeper] : sleepers_) all.push_back(sleeper.model);
  return all;
}

}  // namespace mctl
