#include "generation/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <unordered_map>
#include <unordered_set>

namespace mctl {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();
constexpr std::size_t kFirstSorted = 64;  // of a vocabulary: what is drawn is nearly always among these

std::size_t at_of(TokenId token) { return static_cast<std::size_t>(token); }

}  // namespace

std::array<std::uint32_t, 4> philox(std::array<std::uint32_t, 4> counter, std::array<std::uint32_t, 2> key) {
  auto [a, b, c, d] = counter;
  auto [low, high] = key;
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t left = std::uint64_t{0xD2511F53} * a, right = std::uint64_t{0xCD9E8D57} * c;
    a = static_cast<std::uint32_t>(right >> 32) ^ b ^ low;
    b = static_cast<std::uint32_t>(right);
    c = static_cast<std::uint32_t>(left >> 32) ^ d ^ high;
    d = static_cast<std::uint32_t>(left);
    low += 0x9E3779B9;
    high += 0xBB67AE85;
  }
  return {a, b, c, d};
}

double uniform(std::uint64_t seed, std::uint64_t index, std::uint32_t choice) {
  const auto low = [](std::uint64_t value) { return static_cast<std::uint32_t>(value); };
  const auto words = philox({low(index), low(index >> 32), choice, 0}, {low(seed), low(seed >> 32)});
  return ((words[0] >> 5) * 67108864.0 + (words[1] >> 6)) / 9007199254740992.0;
}

TokenId Sampler::choose(std::span<const float> logits, const Draw& draw) {
  adjust(logits, draw);
  if (draw.sampling.temperature == 0)
    return static_cast<TokenId>(std::max_element(scores_.begin(), scores_.end()) - scores_.begin());
  return draw_one(draw);
}

// Masks, biases and penalties.
void Sampler::adjust(std::span<const float> logits, const Draw& draw) {
  std::ranges::copy(logits, scores_.begin());
  if (!draw.allowed.empty())
    for (std::size_t token = 0; token < scores_.size(); ++token)
      if ((draw.allowed[token / 32] >> token % 32 & 1) == 0) scores_[token] = kNever;
  for (const auto& [token, bias] : draw.bias) scores_[at_of(token)] += bias;
  const Sampling& sampling = draw.sampling;
  if (sampling.repetition != 1) {
    std::unordered_set<TokenId> seen(draw.prompt.begin(), draw.prompt.end());
    seen.insert(draw.made.begin(), draw.made.end());
    for (const TokenId token : seen) {
      float& score = scores_[at_of(token)];
      score *= static_cast<float>(score > 0 ? 1 / sampling.repetition : sampling.repetition);
    }
  }
  if (sampling.presence == 0 && sampling.frequency == 0) return;
  std::unordered_map<TokenId, int> times;
  for (const TokenId token : draw.made) ++times[token];
  for (const auto& [token, count] : times)
    scores_[at_of(token)] -= static_cast<float>(sampling.presence + sampling.frequency * count);
}

double Sampler::chance(std::size_t at, double temperature) const {
  const double best = scores_[at_of(order_[0])];
  return std::exp((scores_[at_of(order_[at])] - best) / temperature);
}

// Makes the first `count` of `order_` the likeliest ones, in order; of equal ones the lower token is first.
void Sampler::sort_to(std::size_t count) {
  count = std::min(count, order_.size());
  if (count <= sorted_) return;
  const auto before = [&](TokenId a, TokenId b) {
    const float x = scores_[at_of(a)], y = scores_[at_of(b)];
    return x != y ? x > y : a < b;
  };
  const auto begin = order_.begin() + static_cast<std::ptrdiff_t>(sorted_);
  const auto end = order_.begin() + static_cast<std::ptrdiff_t>(count);
  if (end != order_.end()) std::nth_element(begin, end, order_.end(), before);
  std::sort(begin, end, before);
  sorted_ = count;
}

// Sorts no more of the vocabulary than it needs.
TokenId Sampler::draw_one(const Draw& draw) {
  const Sampling& sampling = draw.sampling;
  order_.clear();
  sorted_ = 0;
  for (std::size_t token = 0; token < scores_.size(); ++token)
    if (scores_[token] > kNever) order_.push_back(static_cast<TokenId>(token));
  if (order_.empty()) return 0;  // nothing was a number
  if (sampling.top_k > 0 && static_cast<std::size_t>(sampling.top_k) < order_.size()) {
    sort_to(static_cast<std::size_t>(sampling.top_k));
    order_.resize(static_cast<std::size_t>(sampling.top_k));
  }
  sort_to(kFirstSorted);
  double total = 0;
  std::size_t kept = 0;
  for (std::size_t at = 0; at < order_.size(); ++at) {
    const double share = chance(at, sampling.temperature);
    if (share < sampling.min_p) continue;
    total += share;
    ++kept;
  }
  const auto walk = [&](double goal, bool beyond) {  // the place where shares reach the goal, or pass it; their sum
    double sum = 0;
    for (std::size_t at = 0; at < kept; ++at) {
      if (at == sorted_) sort_to(8 * sorted_);
      sum += chance(at, sampling.temperature);
      if (beyond ? sum > goal : sum >= goal) return std::pair(at, sum);
    }
    return std::pair(kept - 1, sum);
  };
  if (sampling.top_p < 1) {
    const auto [last, sum] = walk(sampling.top_p * total, false);
    kept = last + 1;
    total = sum;
  }
  return order_[walk(uniform(sampling.seed, draw.index, draw.choice) * total, true).first];
}

Scored Sampler::score(std::span<const float> logits, TokenId token, std::span<Scored> best) {
  const double largest = *std::ranges::max_element(logits);
  double sum = 0;
  for (const float logit : logits) sum += std::exp(logit - largest);
  const double whole = largest + std::log(sum);
  const auto of = [&](TokenId each) { return Scored{each, static_cast<float>(logits[at_of(each)] - whole)}; };
  if (!best.empty()) {
    std::ranges::copy(logits, scores_.begin());
    order_.resize(scores_.size());
    std::iota(order_.begin(), order_.end(), 0);
    sorted_ = 0;
    sort_to(best.size());
    for (std::size_t at = 0; at < best.size(); ++at) best[at] = of(order_[at]);
  }
  return of(token);
}

}  // namespace mctl
