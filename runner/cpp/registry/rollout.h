// How a rollout goes: a new version takes over step by step, and is taken back when it is worse. A pure function of the
// rollout, what was counted, and how long the step has been held. Mirrored by runner/rollout.py, with which a rollout
// is played before it is run; tests/vectors/registry/rollouts.json and bounds.json run both.
//
//   loading -> shadow (with a mismatch gate) -> step 0, 1, … -> promoted
//        \________________\______________________\---------> taken back
//
// 1. A phase ends when it has been held for `hold_s` and `min_requests` were seen: of a step, requests that the new
//    version answered; of the shadow, requests whose outputs were compared. Until then it waits, and says for what.
// 2. A gate fails when the one-sided bound of its rate or ratio (bounds.h) is beyond what is allowed: what was seen is
//    no accident. The look at the end of a step uses 95 %. Looks before it use 99.9 %, because there are many of them:
//    so all together are wrong in about 5 % of the steps of a version that is just at the limit (Haybittle 1971, Peto
//    et al. 1976), and a version that is plainly bad goes at once.
// 3. errors: the share of the new version's requests that fail. mismatch: the share of compared requests whose outputs
//    differ, since the rollout began. p99: compute times of batches, beside the old version's at equal buckets.
// 4. A batch of the new version may have a bucket that the old one never runs. p99 is then not judged, except that the
//    last step waits until it was: there the batches are as large as the old version's were.
// 5. A server that starts again counts anew in the step that it was in. The last step has nothing to compare with then,
//    and with a p99 gate the one before it is repeated.
#pragma once

#include <boost/json.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "registry/bounds.h"
#include "registry/state.h"

namespace mctl {

// What one version did since the step began.
struct VersionCounts {
  std::int64_t requests = 0, errors = 0;  // errors are among the requests
  LatenciesByBucket compute;              // of batches
};

struct Watched {
  bool can_answer = false;                  // the new version
  std::string failed;                       // why it could not be loaded; empty: it was, or is about to be
  VersionCounts fresh, old;                 // old: in a step of 100 %, of the step before it
  std::int64_t compared = 0, differed = 0;  // shadowed requests, since the rollout began
  std::int64_t held_ms = 0;                 // since the phase or step began, on a clock that does not jump
  std::vector<std::string> worst;           // ids of requests that a person may want to look at
};

enum class Move : std::uint8_t { wait, go_on, promote, take_back };

struct RolloutVerdict {
  Move move = Move::wait;
  std::string gate;              // that failed: load, errors, p99 or mismatch
  std::string text;              // for a person: where it is, what it waits for, or why it is taken back
  boost::json::object evidence;  // of a gate that failed
};

RolloutVerdict judge(const Rollout& rollout, const Watched& watched);

// The change of the state (change.h) that the verdict means, to be made by the server; nullopt for Move::wait.
std::optional<boost::json::value> patch_of(const std::string& model_name, const Rollout& rollout,
                                           const RolloutVerdict& verdict);

// Rule 5, when the server has started; nullopt: it goes on as it is.
std::optional<boost::json::value> resumption(const std::string& model_name, const ModelState& model);

// All requests back to the version before, at once: the end of a rollout that runs, else `stable` to `previous`, or,
// where there is no `stable`, to the version below the highest. Code::conflict: there is none.
Result<boost::json::value> rollback(const std::string& model_name, const ModelState& model);

}  // namespace mctl
