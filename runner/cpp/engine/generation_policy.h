// Which tokens of which requests are computed in the next step: no clock, no caches. Mirrors generation/policy.py,
// whose docstring numbers the rules; tests/vectors/generation/policy.json runs both.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/kv_blocks.h"
#include "engine/shares.h"

namespace mctl {

using SequenceId = std::uint64_t;

// One answer of a request, whether it runs or waits.
struct Sequence {
  SequenceId id = 0;
  std::vector<TokenId> tokens;           // the prompt's, then the new ones
  std::int64_t prompt = 0, most = 0;     // tokens of the prompt; new ones, at most
  Client client = 0;                     // whose turn it takes
  std::uint64_t salt = 0;                // of the blocks that it may share
  std::optional<SequenceId> after = {};  // whose prompt it waits for

  // The policy's own.
  std::int64_t order = 0, turn = 0;
  std::vector<std::int64_t> blocks = {};
  std::int64_t cached = 0;     // tokens whose keys and values are in the blocks
  std::int64_t published = 0;  // blocks
  std::int64_t computed = 0;   // the most that `cached` ever was
  bool counted = true;         // in its client's share of the queue
  bool paused = false;
  bool removed = false;  // while a step with it runs
  int strikes = 0;
  std::int64_t suspect_until = 0;  // tokens; 0: it is no suspect

  std::int64_t length() const { return static_cast<std::int64_t>(tokens.size()); }
  std::int64_t left() const { return length() - cached; }
  std::pair<std::int64_t, std::int64_t> age() const { return {turn, order}; }
};

// Tokens of one sequence in a step: `count` from `start` on; the next one is wanted if these are all it has.
struct PlannedPart {
  SequenceId id = 0;
  std::int64_t start = 0, count = 0;
  bool wanted = false;
};

struct PlannedStep {
  std::vector<PlannedPart> parts;
  std::vector<SequenceId> admitted, preempted;
};

class GenerationPolicy {
 public:
  struct Settings {
    std::int64_t blocks = 0;   // of the caches
    std::int64_t context = 0;  // tokens of a sequence, at most
    std::int64_t step_tokens = 512;
    std::int64_t budget = 512;
    std::int64_t sequences = 64;  // that run at a time; with a block beside them they fit a step
    std::int64_t watermark = 0;   // blocks
    bool evict = true;
  };
  struct Counts {  // since the start
    std::uint64_t preemptions = 0, recomputed_tokens = 0;
    std::uint64_t found_tokens = 0;  // of prompts, in published blocks
  };

  explicit GenerationPolicy(const Settings& settings) : settings_(settings), blocks_(settings.blocks) {}

  // Why no worker could answer; empty if one can.
  std::string never_fits(std::int64_t prompt, std::int64_t most) const;
  void submit(Sequence sequence);  // the caller has asked never_fits
  void remove(SequenceId id);      // it ended, or nobody waits for it
  void pause(SequenceId id, bool paused) { all_.at(id)->paused = paused; }
  void set_budget(std::int64_t tokens) { settings_.budget = tokens; }

  // What to compute now; nullptr if there is nothing. stepped() or died() ends it.
  const PlannedStep* next_step();
  void stepped(const std::unordered_map<SequenceId, TokenId>& tokens);  // the next token of each that wanted one
  std::optional<SequenceId> died();                                     // the one that is guilty, which is removed

  const PlannedStep* step() const { return step_ ? &*step_ : nullptr; }  // that runs
  const Sequence& sequence(SequenceId id) const { return *all_.at(id); }
  const Sequence& planned(const PlannedPart& part) const;  // also one that was removed meanwhile
  std::size_t running() const { return running_.size(); }
  std::size_t waiting() const { return waiting_.size(); }
  const KvBlocks& blocks() const { return blocks_; }
  const Counts& counts() const { return counts_; }
  const Settings& settings() const { return settings_; }

 private:
  using Held = std::shared_ptr<Sequence>;
  using Queue = std::map<std::pair<std::int64_t, std::int64_t>, Held>;  // by age: oldest first

  Held trial() const;
  std::int64_t prefill(PlannedStep& step, const Sequence& sequence, std::int64_t room) const;
  bool grow(Sequence& sequence, PlannedStep& step, const Sequence* trial);
  Held victim(const Sequence* trial) const;
  void preempt(const Held& sequence, PlannedStep& step);
  Held admissible(PlannedStep& step, const Held& trial);
  bool comes_later(const Sequence& sequence) const;
  std::vector<std::int64_t> found_of(const Sequence& sequence) const;
  bool fits(const Sequence& sequence) const;
  std::int64_t needed(const Sequence& sequence) const;
  void admit(const Held& sequence, PlannedStep& step);
  void publish(Sequence& sequence);
  void take_blocks(Sequence& sequence);
  void leave_queue(Sequence& sequence);

  Settings settings_;
  KvBlocks blocks_;
  Counts counts_;
  std::optional<PlannedStep> step_;
  std::unordered_map<SequenceId, Held> all_, in_step_;
  Queue running_, waiting_;
  Shares shares_;
  std::int64_t arrivals_ = 0;
};

}  // namespace mctl
