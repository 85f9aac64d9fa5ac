// Versions that are in memory only while somebody asks for them, while nobody does: their bundles are open, so that
// what they are is known and can be told, and they have no workers.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "engine/served_model.h"
#include "registry/reconcile.h"

namespace mctl {

class Sleepers {
 public:
  // What a version was opened from and with; it is opened anew when that is another.
  struct Source {
    std::string bundle, digest;
    SettingsLayer settings;
    std::int64_t touched_ns = 0;  // when the file was changed last, if that is known
    bool operator==(const Source&) const = default;
  };

  bool empty() const { return sleepers_.empty(); }
  bool has(const ModelVersion& which) const { return sleepers_.contains(which); }
  bool has(const ModelVersion& which, const Source& source) const;
  void put(const ModelVersion& which, Source source, std::shared_ptr<ServedModel> model);
  std::shared_ptr<ServedModel> take(const ModelVersion& which, const Source& source);  // nullptr: there is none
  template <class F>
  void keep_only(F wanted) {
    std::erase_if(sleepers_, [&](const auto& sleeper) { return !wanted(sleeper.first); });
  }

  ServedModel* find(std::string_view name, std::string_view version) const;  // empty: the highest
  std::vector<std::shared_ptr<ServedModel>> all() const;                     // by name, then version

 private:
  struct Sleeper {
    Source source;
    std::shared_ptr<ServedModel> model;
  };
  std::map<ModelVersion, Sleeper> sleepers_;
};

}  // namespace mctl
