#include "format/lookup.h"

#include <algorithm>
#include <functional>
#include <map>
#include <set>

namespace mctl {
namespace {

// Rule 1.
std::int64_t nearest(const std::vector<Choice>& choices, std::int64_t threads) {
  std::set<std::int64_t> measured;
  for (const Choice& choice : choices) measured.insert(choice.threads);
  const auto above = measured.upper_bound(threads);
  return above != measured.begin() ? *std::prev(above) : *above;
}

}  // namespace

std::int64_t bucket_of(std::int64_t size, std::span<const std::int64_t> buckets) {
  const auto bucket = std::ranges::lower_bound(buckets, size);
  return bucket == buckets.end() ? size : *bucket;
}

std::int64_t padded(std::int64_t size, std::span<const std::int64_t> buckets, std::span<const std::int64_t> unpadded) {
  const std::int64_t bucket = bucket_of(size, buckets);
  return std::ranges::find(unpadded, bucket) == unpadded.end() ? bucket : size;
}

Lookup::Lookup(const Manifest& manifest, std::int64_t threads) : manifest_(manifest) {
  if (!manifest.tuning || manifest.tuning->choices.empty()) return;
  const std::int64_t counts = nearest(manifest.tuning->choices, threads);
  for (const Choice& choice : manifest.tuning->choices) {
    if (choice.threads != counts) continue;
    const auto variant = std::ranges::find(manifest.variants, choice.variant, &Variant::name);
    if (variant->threads > threads) continue;
    Entry entry{{}, static_cast<std::size_t>(variant - manifest.variants.begin()), choice.pad};
    for (const Dim& dim : manifest.contract.dims) entry.sizes.push_back(choice.dims.at(dim.name));
    entries_.push_back(std::move(entry));
  }
}

bool Lookup::covered(std::size_t variant, std::span<const std::int64_t> dims) const {
  return covers(manifest_.variants[variant], manifest_.contract, dims);
}

std::optional<std::size_t> Lookup::variant(std::span<const std::int64_t> dims) const {
  std::optional<std::size_t> last;
  for (const Entry& entry : entries_) {
    if (!covered(entry.variant, dims)) continue;
    last = entry.variant;
    if (std::ranges::equal(dims, entry.sizes, std::less_equal{})) return last;
  }
  for (std::size_t i = 0; i < manifest_.variants.size() && !last; ++i)
    if (covered(i, dims)) last = i;
  return last;
}

std::vector<std::int64_t> Lookup::unpadded(std::size_t dim) const {
  std::map<std::int64_t, bool> pads;
  for (const Entry& entry : entries_) pads[entry.sizes[dim]] = pads[entry.sizes[dim]] || entry.pad;
  std::vector<std::int64_t> sizes;
  for (const auto& [size, pad] : pads)
    if (!pad) sizes.push_back(size);
  return sizes;
}

}  // namespace mctl
