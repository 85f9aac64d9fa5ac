#include "engine/kv_blocks.h"

namespace mctl {

KvBlocks::KvBlocks(std::int64_t count) : blocks_(static_cast<std::size_t>(count)) {
  for (std::int64_t block = count; block-- > 0;) free_.push_back(block);
}

std::optional<std::int64_t> KvBlocks::take() {
  std::int64_t block;
  if (!free_.empty()) {
    block = free_.back();
    free_.pop_back();
  } else if (!idle_.empty()) {
    block = idle_.front();
    idle_.pop_front();
    Block& held = at(block);
    known_.erase(held.key);
    held.publication = 0;
    held.is_idle = false;
  } else {
    return std::nullopt;
  }
  at(block).holders = 1;
  return block;
}

std::vector<std::int64_t> KvBlocks::find(std::span<const TokenId> tokens, std::uint64_t salt) const {
  std::vector<std::int64_t> found;
  std::int64_t parent = 0;
  for (std::size_t start = 0; start + kBlock <= tokens.size(); start += kBlock) {
    const auto part = tokens.subspan(start, kBlock);
    const auto known = known_.find(Key(parent, salt, {part.begin(), part.end()}));
    if (known == known_.end()) break;
    found.push_back(known->second);
    parent = blocks_[static_cast<std::size_t>(known->second)].publication;
  }
  return found;
}

void KvBlocks::hold(std::int64_t block) {
  Block& held = at(block);
  ++held.holders;
  if (held.is_idle) idle_.erase(held.place);
  held.is_idle = false;
}

void KvBlocks::release(std::span<const std::int64_t> blocks) {
  for (std::size_t i = blocks.size(); i-- > 0;) {
    Block& held = at(blocks[i]);
    if (--held.holders > 0) continue;
    if (held.publication == 0) {
      free_.push_back(blocks[i]);
      continue;
    }
    held.place = idle_.insert(idle_.end(), blocks[i]);
    held.is_idle = true;
  }
}

void KvBlocks::publish(std::span<const std::int64_t> blocks, std::span<const TokenId> tokens, std::uint64_t salt) {
  const std::int64_t parent = blocks.size() > 1 ? at(blocks[blocks.size() - 2]).publication : 0;
  if (blocks.size() > 1 && parent == 0) return;  // nobody could find it
  Block& held = at(blocks.back());
  if (held.publication != 0) return;
  const auto [place, is_new] = known_.try_emplace(Key(parent, salt, {tokens.begin(), tokens.end()}), blocks.back());
  if (!is_new) return;
  held.publication = ++publications_;
  held.key = place;
}

}  // namespace mctl
