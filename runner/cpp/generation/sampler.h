// The next token from logits, the same for the same seed whatever else is computed beside it. Mirrors
// generation/sampler.py, whose docstring says how; tests/vectors/generation/sampling.json runs both.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace mctl {

using TokenId = std::int32_t;

// How one token is chosen.
struct Sampling {
  double temperature = 0;  // 0: the most likely one
  double top_p = 1, min_p = 0;
  double repetition = 1, presence = 0, frequency = 0;
  std::uint64_t seed = 0;
  std::int64_t top_k = 0;  // 0: all
};

// What one row of logits is sampled with.
struct Draw {
  Sampling sampling;
  std::uint64_t index = 0;                          // of the new token in its answer
  std::uint32_t choice = 0;                         // of the answer in its request
  std::span<const TokenId> prompt = {}, made = {};  // the tokens so far, for penalties
  std::span<const std::pair<TokenId, float>> bias = {};
  std::span<const std::uint32_t> allowed = {};  // a bit for each token; empty: all
};

struct Scored {
  TokenId token = 0;
  float logprob = 0;
};

class Sampler {
 public:
  explicit Sampler(std::size_t vocabulary) : scores_(vocabulary) {}

  TokenId choose(std::span<const float> logits, const Draw& draw);

  // Log-probabilities by raw logits: that of `token`, and the likeliest ones.
  Scored score(std::span<const float> logits, TokenId token, std::span<Scored> best);

 private:
  void adjust(std::span<const float> logits, const Draw& draw);
  TokenId draw_one(const Draw& draw);
  void sort_to(std::size_t count);
  double chance(std::size_t at, double temperature) const;

  std::vector<float> scores_;
  std::vector<TokenId> order_;  // tokens that may come; the first `sorted_` are the likeliest, in order
  std::size_t sorted_ = 0;
};

// A number in [0, 1) that depends on these three alone: 53 bits of Philox.
double uniform(std::uint64_t seed, std::uint64_t index, std::uint32_t choice);

// Philox4x32-10: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (2011).
std::array<std::uint32_t, 4> philox(std::array<std::uint32_t, 4> counter, std::array<std::uint32_t, 2> key);

}  // namespace mctl
