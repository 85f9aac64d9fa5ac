// The blocks of a model's caches: who holds them, and which beginnings of texts they keep for others. Mirrors
// generation/blocks.py, whose docstring says how; tests/vectors/generation/policy.json runs both.
#pragma once

#include <cstdint>
#include <list>
#include <map>
#include <optional>
#include <span>
#include <tuple>
#include <vector>

#include "generation/sampler.h"

namespace mctl {

constexpr std::int64_t kBlock = 16;  // positions of one request in a block

class KvBlocks {
 public:
  explicit KvBlocks(std::int64_t count);

  std::int64_t count() const { return static_cast<std::int64_t>(blocks_.size()); }
  std::int64_t available() const { return static_cast<std::int64_t>(free_.size() + idle_.size()); }  // can be taken
  std::int64_t idle() const { return static_cast<std::int64_t>(idle_.size()); }  // of these, they keep a beginning
  bool is_idle(std::int64_t block) const { return blocks_[static_cast<std::size_t>(block)].is_idle; }

  std::optional<std::int64_t> take();  // for its first holder; it may hold anything

  // The published blocks that a text begins with: full ones, of which nobody becomes a holder yet.
  std::vector<std::int64_t> find(std::span<const TokenId> tokens, std::uint64_t salt) const;

  void hold(std::int64_t block);                       // one more holder of a block that find() gave
  void release(std::span<const std::int64_t> blocks);  // one less of each; the last ones are given to others first

  // The last of a text's blocks is full of its last 16 tokens. Where others published the same, it stays private.
  void publish(std::span<const std::int64_t> blocks, std::span<const TokenId> tokens, std::uint64_t salt);

 private:
  using Key = std::tuple<std::int64_t, std::uint64_t, std::vector<TokenId>>;  // publication of the parent, salt, tokens
  using Known = std::map<Key, std::int64_t>;
  struct Block {
    std::int64_t holders = 0, publication = 0;  // 0: it is not published
    Known::iterator key;                        // of one that is
    bool is_idle = false;
    std::list<std::int64_t>::iterator place;  // of one that is, in idle_
  };

  Block& at(std::int64_t block) { return blocks_[static_cast<std::size_t>(block)]; }

  std::vector<Block> blocks_;
  std::vector<std::int64_t> free_;
  std::list<std::int64_t> idle_;  // published and held by nobody, the least recently used first
  Known known_;
  std::int64_t publications_ = 0;
};

}  // namespace mctl
