#include "engine/generation_policy.h"

#include <algorithm>

namespace mctl {
namespace {

constexpr int kStrikes = 2;  // deaths of a worker alone with a sequence

std::int64_t blocks_for(std::int64_t tokens) { return (tokens + kBlock - 1) / kBlock; }

void add(PlannedStep& step, const Sequence& sequence, std::int64_t count) {
  step.parts.push_back({sequence.id, sequence.cached, count, count == sequence.left()});
}

}  // namespace

// --- what is asked

std::string GenerationPolicy::never_fits(std::int64_t prompt, std::int64_t most) const {
  const std::int64_t needed = blocks_for(std::min(prompt + most, settings_.context));
  if (needed <= settings_.blocks) return "";
  return std::to_string(prompt) + " tokens and " + std::to_string(most) + " new ones need " + std::to_string(needed) +
         " blocks of " + std::to_string(kBlock) + ", there are " + std::to_string(settings_.blocks);
}

void GenerationPolicy::submit(Sequence given) {
  const auto sequence = std::make_shared<Sequence>(std::move(given));
  sequence->prompt = sequence->length();
  sequence->turn = shares_.join(sequence->client, sequence->prompt + sequence->most);
  sequence->order = arrivals_++;
  all_[sequence->id] = sequence;
  waiting_.emplace(sequence->age(), sequence);
}

void GenerationPolicy::remove(SequenceId id) {
  const auto found = all_.find(id);
  const Held sequence = found->second;
  all_.erase(found);
  if (waiting_.contains(sequence->age())) {
    leave_queue(*sequence);
  } else if (in_step_.contains(id)) {
    sequence->removed = true;
  } else {
    running_.erase(sequence->age());
    take_blocks(*sequence);
  }
}

const Sequence& GenerationPolicy::planned(const PlannedPart& part) const { return *in_step_.at(part.id); }

// --- steps

const PlannedStep* GenerationPolicy::next_step() {
  PlannedStep step;
  const Held alone = trial();
  std::vector<Held> able;
  for (const auto& [age, sequence] : running_)
    if (!sequence->paused && (!alone || sequence == alone)) able.push_back(sequence);
  const auto runs = [&](const Held& sequence) { return running_.contains(sequence->age()); };
  for (const Held& each : able)
    if (each->left() == 1 && runs(each) && grow(*each, step, alone.get())) add(step, *each, 1);
  const auto decoding = static_cast<std::int64_t>(step.parts.size());
  std::int64_t room = decoding > 0 ? std::max(settings_.budget - decoding, kBlock) : settings_.step_tokens;
  room = std::min(room, settings_.step_tokens - decoding);
  for (const Held& each : able)
    if (each->left() > 1 && runs(each)) room -= prefill(step, *each, room);
  while (room > 0) {
    const Held next = admissible(step, alone);
    if (!next) break;
    admit(next, step);
    const std::int64_t taken = prefill(step, *next, room);
    room = taken > 0 ? room - taken : 0;
  }
  if (step.parts.empty()) return nullptr;
  step_ = std::move(step);
  for (const PlannedPart& part : step_->parts) in_step_[part.id] = all_.at(part.id);
  return &*step_;
}

void GenerationPolicy::stepped(const std::unordered_map<SequenceId, TokenId>& tokens) {
  const auto parts = std::move(step_->parts);
  step_.reset();
  const auto held = std::move(in_step_);
  in_step_.clear();
  for (const PlannedPart& part : parts) {
    Sequence& sequence = *held.at(part.id);
    const std::int64_t end = part.start + part.count;
    counts_.recomputed_tokens +=
        static_cast<std::uint64_t>(std::max<std::int64_t>(0, std::min(end, sequence.computed) - part.start));
    sequence.cached = end;
    sequence.computed = std::max(end, sequence.computed);
    publish(sequence);
    if (part.wanted) sequence.tokens.push_back(tokens.at(part.id));
    if (sequence.cached >= sequence.suspect_until) sequence.suspect_until = sequence.strikes = 0;
    if (!sequence.removed) continue;
    running_.erase(sequence.age());
    take_blocks(sequence);
  }
}

std::optional<SequenceId> GenerationPolicy::died() {
  const auto parts = step_ ? std::move(step_->parts) : std::vector<PlannedPart>();
  step_.reset();
  in_step_.clear();
  std::optional<SequenceId> guilty;
  for (const PlannedPart& part : parts) {
    const auto found = all_.find(part.id);
    if (found == all_.end()) continue;
    Sequence& sequence = *found->second;
    if (sequence.suspect_until > 0 && parts.size() == 1) ++sequence.strikes;
    sequence.suspect_until = std::max(sequence.suspect_until, part.start + part.count);
    if (sequence.strikes >= kStrikes) guilty = part.id;
  }
  blocks_ = KvBlocks(settings_.blocks);
  for (const auto& [age, sequence] : running_) {
    sequence->blocks.clear();
    sequence->cached = sequence->published = 0;
    if (!sequence->removed) waiting_.emplace(age, sequence);
  }
  running_.clear();
  if (guilty) remove(*guilty);
  return guilty;
}

// --- parts of a step

// The suspect whose turn it is to run alone.
GenerationPolicy::Held GenerationPolicy::trial() const {
  Held chosen;
  for (const Queue* queue : {&running_, &waiting_}) {
    for (const auto& [age, each] : *queue) {
      if (each->suspect_until == 0 || each->paused) continue;
      if (!chosen || std::pair(each->strikes, age) < std::pair(chosen->strikes, chosen->age())) chosen = each;
    }
  }
  return chosen;
}

std::int64_t GenerationPolicy::prefill(PlannedStep& step, const Sequence& sequence, std::int64_t room) const {
  std::int64_t count = std::min(sequence.left(), room);
  if (count < sequence.left()) count = (sequence.cached + count) / kBlock * kBlock - sequence.cached;
  if (count <= 0) return 0;
  add(step, sequence, count);
  return count;
}

// A place for one more token; false if it had to give its blocks up.
bool GenerationPolicy::grow(Sequence& sequence, PlannedStep& step, const Sequence* trial) {
  if (sequence.cached < static_cast<std::int64_t>(sequence.blocks.size()) * kBlock) return true;
  auto block = blocks_.take();
  for (; !block; block = blocks_.take()) {
    const Held chosen = victim(trial);
    preempt(chosen, step);
    if (chosen.get() == &sequence) return false;
  }
  sequence.blocks.push_back(*block);
  return true;
}

GenerationPolicy::Held GenerationPolicy::victim(const Sequence* trial) const {
  Held paused, youngest;
  for (const auto& [age, each] : running_) {
    if (each.get() == trial) continue;
    youngest = each;
    if (each->paused) paused = each;
  }
  return paused ? paused : youngest;
}

void GenerationPolicy::preempt(const Held& sequence, PlannedStep& step) {
  running_.erase(sequence->age());
  take_blocks(*sequence);
  waiting_.emplace(sequence->age(), sequence);
  step.preempted.push_back(sequence->id);
  ++counts_.preemptions;
}

GenerationPolicy::Held GenerationPolicy::admissible(PlannedStep& step, const Held& trial) {
  if (trial) {
    if (running_.contains(trial->age())) return nullptr;
    while (!fits(*trial)) preempt(victim(trial.get()), step);
    return trial;
  }
  if (!step.preempted.empty() || static_cast<std::int64_t>(running_.size()) >= settings_.sequences) return nullptr;
  for (const auto& [age, head] : waiting_)
    if (!head->paused && !comes_later(*head)) return fits(*head) ? head : nullptr;
  return nullptr;
}

bool GenerationPolicy::comes_later(const Sequence& sequence) const {
  if (!sequence.after) return false;
  const auto first = all_.find(*sequence.after);
  return first != all_.end() && first->second->computed < first->second->prompt;
}

// The last token is computed in any case.
std::vector<std::int64_t> GenerationPolicy::found_of(const Sequence& sequence) const {
  return blocks_.find(std::span(sequence.tokens).first(sequence.tokens.size() - 1), sequence.salt);
}

bool GenerationPolicy::fits(const Sequence& sequence) const {
  const auto found = found_of(sequence);
  const std::int64_t spare = !running_.empty() && settings_.evict ? settings_.watermark : 0;
  const auto idle = std::ranges::count_if(found, [&](std::int64_t block) { return blocks_.is_idle(block); });
  return blocks_.available() - idle >= needed(sequence) - static_cast<std::int64_t>(found.size()) + spare;
}

std::int64_t GenerationPolicy::needed(const Sequence& sequence) const {
  const std::int64_t whole = std::min(sequence.prompt + sequence.most, settings_.context);
  return blocks_for(settings_.evict ? sequence.length() : whole);
}

void GenerationPolicy::admit(const Held& sequence, PlannedStep& step) {
  leave_queue(*sequence);
  shares_.started(sequence->turn);
  sequence->blocks = found_of(*sequence);
  const auto found = static_cast<std::int64_t>(sequence->blocks.size());
  for (const std::int64_t block : sequence->blocks) blocks_.hold(block);
  while (static_cast<std::int64_t>(sequence->blocks.size()) < needed(*sequence))
    sequence->blocks.push_back(blocks_.take().value());
  sequence->cached = found * kBlock;
  sequence->published = found;
  if (sequence->computed == 0) counts_.found_tokens += static_cast<std::uint64_t>(sequence->cached);
  running_.emplace(sequence->age(), sequence);
  step.admitted.push_back(sequence->id);
}

void GenerationPolicy::publish(Sequence& sequence) {
  const std::span<const TokenId> tokens(sequence.tokens);
  while (sequence.published < sequence.cached / kBlock) {
    const auto start = static_cast<std::size_t>(sequence.published * kBlock);
    ++sequence.published;
    const auto held = std::span(sequence.blocks).first(static_cast<std::size_t>(sequence.published));
    blocks_.publish(held, tokens.subspan(start, kBlock), sequence.salt);
  }
}

void GenerationPolicy::take_blocks(Sequence& sequence) {
  blocks_.release(sequence.blocks);
  sequence.blocks.clear();
  sequence.cached = sequence.published = 0;
}

void GenerationPolicy::leave_queue(Sequence& sequence) {
  waiting_.erase(sequence.age());
  if (sequence.counted) shares_.leave(sequence.client, sequence.prompt + sequence.most);
  sequence.counted = false;
}

}  // namespace mctl
