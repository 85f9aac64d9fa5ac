// Runs the rollouts of a fleet: counts what the two versions of each do, has it judged (rollout.h), and makes the
// change that the verdict means.
#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/steady_timer.hpp>
#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "engine/metrics.h"
#include "pool/guard.h"
#include "registry/fleet.h"
#include "registry/rollout.h"

namespace mctl {

class Rollouts {
 public:
  Rollouts(boost::asio::io_context& io, Fleet& fleet) : fleet_(fleet), timer_(io) {}

  void begin();  // once the fleet has; goes on where a server before this one was
  // Where a model's rollout is, for a person; empty: there is none.
  std::string told(const std::string& model) const;

 private:
  // What one version had done when the step began, and what its batches took since.
  struct Counter {
    std::weak_ptr<ServedModel> model;  // another one after a reload: it begins anew
    std::int64_t requests = 0, errors = 0;
    VersionCounts gone;  // of those before it in this step
  };
  struct Progress {
    std::string version;
    RolloutPhase phase = RolloutPhase::loading;
    std::int64_t step = 0, began_ms = 0;
    Counter fresh, old;
    VersionCounts old_before;                 // of the step before the last
    std::int64_t compared = 0, differed = 0;  // before the rollout began
    std::string text;
  };

  void tick();
  void look(const std::string& name, const ModelState& model, std::int64_t now_ms);
  void begin_step(Progress& progress, const std::string& name, const Rollout& rollout, std::int64_t now_ms);
  void follow(Counter& counter, const std::string& name, const std::string& version);
  static VersionCounts counted(const Counter& counter);
  Watched watched(const Progress& progress, const std::string& name, const Rollout& rollout, std::int64_t now_ms) const;
  void decide(const std::string& name, const Rollout& rollout, const RolloutVerdict& verdict, Progress& progress);

  Fleet& fleet_;
  boost::asio::steady_timer timer_;
  std::map<std::string, Progress> progress_;  // by model
  const Guard guard_;
};

}  // namespace mctl
