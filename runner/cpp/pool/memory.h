// How much memory this process may use, and what is left of it.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

namespace mctl {

// Bytes: those of the machine, or fewer by the limits of its cgroups, version 1 or 2. `root` is where /proc and /sys
// lie.
std::size_t memory_allowed(const std::string& root = "");

// Bytes that can still be had without swapping: what the kernel counts as available (proc_meminfo(5)), or less where a
// cgroup leaves less. What a cgroup has read from files counts as free: it is given up first. Empty: not known.
std::optional<std::size_t> memory_free(const std::string& root = "");

}  // namespace mctl
