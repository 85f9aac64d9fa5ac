// The models that a server has now, by name and version.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/served_model.h"
#include "format/result.h"

namespace mctl {

class Models {
 public:
  // Code::usage if the name and version are taken.
  Status add(std::shared_ptr<ServedModel> model);

  // The one that answers requests for a name and a version. An empty version: the highest, of those that are ready if
  // any is. Code::not_found says what is there.
  Result<ServedModel*> find(std::string_view name, std::string_view version = {}) const;
  std::span<const std::shared_ptr<ServedModel>> versions(std::string_view name) const;  // ascending; of none: empty

  std::span<const std::shared_ptr<ServedModel>> all() const { return all_; }  // by name, then version
  Status ready() const;                                                       // all are; else what one waits for
  bool idle() const;
  void drain();

 private:
  Error unknown(std::string_view name) const;

  struct Range {
    std::size_t begin = 0, count = 0;  // in all_
  };
  std::vector<std::shared_ptr<ServedModel>> all_;
  std::map<std::string, Range, std::less<>> by_name_;
};

}  // namespace mctl
