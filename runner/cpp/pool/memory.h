// How much memory this process may use.
#pragma once

#include <cstddef>
#include <string>

namespace mctl {

// Bytes: those of the machine, or fewer by the limits of its cgroups, version 1 or 2. `root` is where /proc and /sys
// lie.
std::size_t memory_allowed(const std::string& root = "");

}  // namespace mctl
