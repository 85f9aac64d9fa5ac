// Are two tensors the same within a tolerance?
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "format/contract.h"
#include "format/manifest.h"

namespace mctl {

// As bundle_format/tolerances.py has it; 0 where elements have to be equal.
double floor_of(Dtype dtype);

// Empty if they are: they differ by no more than atol + rtol * |wanted|, or, of floats, than a few roundings of the
// dtype relative to the element plus the mean one (the floor); NaN is where NaN is, and infinities are
// the same. Else what differs most, for a person. Both hold row-major elements of the dtype.
std::string difference(Dtype dtype, std::span<const std::byte> got, std::span<const std::byte> wanted,
                       Tolerance tolerance);

}  // namespace mctl
