// Which variant runs, by sizes and threads, and what sizes are padded to. Mirrors bundle_format/lookup.py, whose
// docstring numbers the rules; tests/vectors/contract/lookup.json runs both.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "format/contract.h"
#include "format/manifest.h"

namespace mctl {

// Rule 4: the first bucket that holds `size`, or `size` itself where none does.
std::int64_t bucket_of(std::int64_t size, std::span<const std::int64_t> buckets);
// The same, but `size` stays where its bucket is one of `unpadded`.
std::int64_t padded(std::int64_t size, std::span<const std::int64_t> buckets, std::span<const std::int64_t> unpadded);

class Lookup {
 public:
  Lookup(const Manifest& manifest, std::int64_t threads);  // which has to stay

  // Its index among the manifest's variants; nullopt if none covers these sizes.
  std::optional<std::size_t> variant(std::span<const std::int64_t> dims) const;
  // The buckets of a dim up to which sizes run as they are, ascending.
  std::vector<std::int64_t> unpadded(std::size_t dim) const;

 private:
  struct Entry {
    DimSizes sizes;
    std::size_t variant = 0;
    bool pad = true;
  };
  bool covered(std::size_t variant, std::span<const std::int64_t> dims) const;

  const Manifest& manifest_;
  std::vector<Entry> entries_;
};

}  // namespace mctl
