// The versions of models that answer now, by name and version, and where the requests go that name no version.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "engine/served_model.h"
#include "format/result.h"
#include "registry/state.h"
#include "registry/traffic.h"

namespace mctl {

class Models {
 public:
  using Labels = std::map<std::string, std::string, std::less<>>;  // to versions

  void put(std::shared_ptr<ServedModel> model);  // in the place of the one of its name and version
  void remove(const ServedModel& model);
  // Requests for a name that say no version are counted out by `shares`. While there are none, they are refused by a
  // version that is not ready. Until this is called the highest that is ready has them.
  void direct(const std::string& name, std::vector<Share> shares, Labels labels);
  const std::vector<Share>& shares(std::string_view name) const;
  const std::vector<Share>& last_shares(std::string_view name) const;  // the last that were not empty

  // For one request, by its version or label, else by its key, else in turn.
  Result<ServedModel*> choose(std::string_view name, std::string_view version, std::string_view key);
  // To look at: that of the version or label, else the one with most of the requests. Code::not_found says what is
  // there.
  Result<ServedModel*> find(std::string_view name, std::string_view version = {}) const;

  Error unknown(std::string_view name) const;  // says which there are

  std::vector<std::shared_ptr<ServedModel>> versions(std::string_view name) const;  // ascending; of none: empty
  std::vector<std::shared_ptr<ServedModel>> all() const;                            // by name, then version

 private:
  struct Named {
    std::map<std::string, std::shared_ptr<ServedModel>, VersionLess> versions;
    Labels labels;
    Traffic traffic;
    std::vector<Share> last;
    bool directed = false;

    ServedModel* version(std::string_view name) const;
    ServedModel* highest() const;  // that is ready, if any is
    ServedModel* awaited() const;  // that would answer, if it were ready
  };

  std::map<std::string, Named, std::less<>> named_;  // each has a version
};

}  // namespace mctl
