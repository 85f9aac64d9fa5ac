#include "engine/pace.h"

#include <algorithm>

namespace mctl {
namespace {

constexpr std::int64_t kLateOfAWindow = 10;
constexpr std::size_t kMaxKinds = 1024;

// When instances that are free after these times have done the work and one of them takes the next batch (rule 11).
std::int64_t begin_after(std::span<std::int64_t> free_after_us, std::int64_t work_us) {
  if (free_after_us.empty()) return 0;
  std::sort(free_after_us.begin(), free_after_us.end());
  std::int64_t total = work_us, count = 0, least = INT64_MAX;
  for (const std::int64_t free : free_after_us) {
    total += free;
    least = std::min(least, total / ++count);
  }
  return least;
}

}  // namespace

Pace::Pace(const BatchSettings& settings)
    : settings_(settings),
      smallest_(
          settings.allowed_batch_sizes.empty() ? 1 : std::min(settings.allowed_batch_sizes.front(), settings.limit())),
      value_(settings.limit()),
      limit_(settings.limit()) {}

std::optional<std::int64_t> Pace::bound_us() const {
  if (!settings_.latency_target_us) return std::nullopt;
  return *settings_.latency_target_us * 7 / 8;
}

// --- costs
// ------------------------------------------------------------------------------------------------------------

std::size_t Pace::kind(const std::string& name) {
  const auto found = names_.find(name);
  if (found != names_.end()) return found->second;
  if (kinds_.size() == kMaxKinds) return kMaxKinds - 1;
  kinds_.emplace_back();
  return names_[name] = kinds_.size() - 1;
}

void Pace::seed(std::span<const Seed> seeds) {
  for (const Seed& seed : seeds) {
    auto& known = kinds_[seed.kind].cost8;
    const auto at = std::lower_bound(known.begin(), known.end(), std::pair(seed.padded, INT64_MIN));
    if (at == known.end() || at->first != seed.padded) known.insert(at, {seed.padded, 8 * seed.us});
  }
  const auto bound = bound_us();
  if (!bound || seeds.empty() || era_ > 0 || seen_ > 0) return;
  std::vector<std::int64_t> sizes = settings_.allowed_batch_sizes;
  if (sizes.empty()) {
    for (const Seed& seed : seeds) sizes.push_back(seed.padded);
  }
  sizes.push_back(settings_.limit());
  std::int64_t most = 0;
  for (std::int64_t size : sizes) {
    size = effective(size);
    for (std::size_t kind = 0; kind < kinds_.size(); ++kind) {
      if (!kinds_[kind].cost8.empty() && 2 * cost(kind, size) <= *bound) most = std::max(most, size);
    }
  }
  change(most > 0 ? most : smallest_);
}

std::int64_t Pace::cost(std::size_t kind, std::int64_t rows) const {
  const auto& known = kinds_[kind].cost8;
  const auto above = std::upper_bound(known.begin(), known.end(), std::pair(settings_.padded(rows), INT64_MAX));
  return above == known.begin() ? 0 : std::prev(above)->second / 8;
}

void Pace::learn(const Formed& batch, std::int64_t took_us) {
  Kind& kind = kinds_[batch.kind];
  const auto at = std::lower_bound(kind.cost8.begin(), kind.cost8.end(), std::pair(batch.padded, INT64_MIN));
  if (at != kind.cost8.end() && at->first == batch.padded) {
    at->second += took_us - at->second / 8;
  } else {
    kind.cost8.insert(at, {batch.padded, 8 * took_us});
  }
  kind.last = batch.padded;
}

// --- what waits
// -------------------------------------------------------------------------------------------------------

void Pace::joined(const std::string& key, std::size_t kind, std::int64_t rows) {
  count(keys_.try_emplace(key, Key{kind}).first->second, rows);
}

void Pace::left(const std::string& key, std::int64_t rows) {
  const auto found = keys_.find(key);
  count(found->second, -rows);
  if (found->second.rows == 0) keys_.erase(found);
}

void Pace::count(Key& key, std::int64_t rows) {
  rows_ += rows;
  key.rows += rows;
  reckon(key);
}

void Pace::reckon(Key& key) {
  const std::int64_t whole = key.rows / limit_, rest = key.rows % limit_;
  std::int64_t work = whole > 0 ? whole * cost(key.kind, limit_) : 0;
  if (rest > 0) work += cost(key.kind, rest);
  work_us_ += work - key.work_us;
  key.work_us = work;
}

// --- arrivals
// ---------------------------------------------------------------------------------------------------------

Estimate Pace::estimate(const std::string& key, std::size_t kind, std::int64_t rows,
                        std::span<std::int64_t> free_after_us, bool first) const {
  const auto found = keys_.find(key);
  const Key waiting = found != keys_.end() && !first ? found->second : Key{kind};
  const std::int64_t others = first ? 0 : work_us_ - waiting.work_us, full = cost(kind, limit_);
  const std::int64_t ahead = waiting.rows / limit_, before_last = (waiting.rows + rows - 1) / limit_;
  const std::int64_t own = waiting.rows + rows - before_last * limit_;
  const std::int64_t takes = std::max(cost(kind, own), cost(kind, std::min(kinds_[kind].last, limit_)));
  const std::int64_t wait = begin_after(free_after_us, others + ahead * full);
  return {wait, begin_after(free_after_us, others + before_last * full) + takes};
}

std::int64_t Pace::wait_us(std::span<std::int64_t> free_after_us) const { return begin_after(free_after_us, work_us_); }

std::int64_t Pace::time_us(std::int64_t timeout_us, bool stated) const {
  const auto bound = bound_us();
  return stated || !bound ? timeout_us : std::min(timeout_us, *bound);
}

void Pace::refused(std::size_t kind, bool stated) {
  const auto bound = bound_us();
  if (!bound || stated) return;
  if (2 * cost(kind, limit_) > *bound && 2 * cost(kind, smallest_) <= *bound) {
    record(1, 1, false);
  }
}

// --- batches
// ----------------------------------------------------------------------------------------------------------

Formed Pace::formed(std::size_t kind, std::int64_t rows, bool full) const {
  return {kind, settings_.padded(rows), full, era_};
}

void Pace::finished(const Formed& batch, std::int64_t took_us, std::span<const std::int64_t> waits_us,
                    const std::optional<Ran>& ahead) {
  const std::int64_t late = late_of(batch, took_us, waits_us, ahead);
  learn(batch, took_us);
  if (!settings_.latency_target_us) return;
  const auto requests = static_cast<std::int64_t>(waits_us.size());
  owe(requests, late);
  if (batch.era == era_ && (!ahead || ahead->batch.era == era_)) record(requests, late, batch.full);
}

std::int64_t Pace::late_of(const Formed& batch, std::int64_t took_us, std::span<const std::int64_t> waits_us,
                           const std::optional<Ran>& ahead) const {
  if (!settings_.latency_target_us) return 0;
  const std::int64_t target = *settings_.latency_target_us, before = ahead ? ahead->took_us : 0;
  const std::int64_t own_spare = spare(batch), spare_before = ahead ? spare(ahead->batch) : 0;
  return std::count_if(waits_us.begin(), waits_us.end(), [&](std::int64_t wait) {
    const std::int64_t waited = std::min(wait, before);
    return waited + took_us > target &&
           std::max<std::int64_t>(0, waited - spare_before) + took_us - own_spare <= target;
  });
}

// How much less a batch would have cost at the smallest size.
std::int64_t Pace::spare(const Formed& batch) const {
  return std::max<std::int64_t>(0, cost(batch.kind, batch.padded) - cost(batch.kind, smallest_));
}

// --- the limit
// --------------------------------------------------------------------------------------------------------

// Requests count for the window.
void Pace::record(std::int64_t requests, std::int64_t late, bool full) {
  seen_ += requests;
  late_ += late;
  if (full) full_ += requests;
  if (late_ > kLateOfAWindow) {
    change(std::max(smallest_, limit_ * 9 / 10));
  } else if (seen_ >= 1000 / (100 - settings_.percentile)) {
    const bool grows = 2 * full_ >= seen_ && owed_ == 0;
    change(grows ? value_ + std::max<std::int64_t>(1, settings_.limit() / 16) : value_);
  }
}

void Pace::owe(std::int64_t requests, std::int64_t late) {
  const std::int64_t owed = owed_ + late * settings_.percentile - (requests - late) * (100 - settings_.percentile);
  owed_ = std::clamp<std::int64_t>(owed, 0, settings_.limit() * settings_.percentile);
}

// A window ends.
void Pace::change(std::int64_t value) {
  seen_ = late_ = full_ = 0;
  value_ = value;
  const std::int64_t limit = effective(value);
  if (limit == limit_) return;
  limit_ = limit;
  ++era_;
  for (auto& [_, key] : keys_) reckon(key);
}

std::int64_t Pace::effective(std::int64_t value) const {
  const auto& sizes = settings_.allowed_batch_sizes;
  if (value >= settings_.limit() || sizes.empty()) return std::min(value, settings_.limit());
  const auto above = std::upper_bound(sizes.begin(), sizes.end(), value);
  return above == sizes.begin() ? smallest_ : *std::prev(above);
}

}  // namespace mctl
