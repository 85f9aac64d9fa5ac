#include "pool/memory.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <string_view>

namespace mctl {
namespace {

// A limit's file holds a number, or `max`; SIZE_MAX if there is none.
std::size_t limit_in(const std::string& path) {
  std::ifstream file(path);
  std::size_t bytes = 0;
  return file >> bytes ? bytes : SIZE_MAX;
}

// The number behind a name in a file of such pairs.
std::optional<std::size_t> number_in(const std::string& path, std::string_view name) {
  std::ifstream file(path);
  std::string word;
  for (std::size_t number = 0; file >> word;)
    if (word == name && file >> number) return number;
  return std::nullopt;
}

// The files of a cgroup, version 2 or 1.
struct Files {
  std::string_view limit, used, from_files;
};
constexpr Files kUnified{"memory.max", "memory.current", "inactive_file"};
constexpr Files kLegacy{"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"};

std::size_t limit_of(const std::string& group, const Files& files) {
  return limit_in(group + "/" + std::string(files.limit));
}

std::size_t free_of(const std::string& group, const Files& files) {
  const std::size_t limit = limit_of(group, files);
  if (limit == SIZE_MAX) return SIZE_MAX;
  const std::size_t used = limit_in(group + "/" + std::string(files.used));
  const std::size_t read = std::min(used, number_in(group + "/memory.stat", files.from_files).value_or(0));
  return limit - std::min(limit, used == SIZE_MAX ? 0 : used - read);
}

// The least of a group and of those it lies in. In a container its own group is often mounted as the root.
template <class F>
std::size_t least_of(const std::string& mount, std::string group, const Files& files, F bytes_of) {
  std::size_t least = SIZE_MAX;
  for (;;) {
    while (group.ends_with('/')) group.pop_back();
    least = std::min(least, bytes_of(mount + group, files));
    if (group.empty()) return least;
    group.resize(group.rfind('/') == group.npos ? 0 : group.rfind('/'));
  }
}

// The least that this process's cgroups say.
template <class F>
std::size_t least_of_groups(const std::string& root, F bytes_of) {
  const std::string mount = root + "/sys/fs/cgroup";
  std::size_t least = SIZE_MAX;
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {  // NUMBER:CONTROLLERS:GROUP
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == line.npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",",
                      group = line.substr(second + 1);
    if (controllers == ",,") least = std::min(least, least_of(mount, group, kUnified, bytes_of));
    if (controllers.find(",memory,") != controllers.npos)
      least = std::min(least, least_of(mount + "/memory", group, kLegacy, bytes_of));
  }
  return least;
}

}  // namespace

std::size_t memory_allowed(const std::string& root) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return std::min(static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES)) * page, least_of_groups(root, limit_of));
}

std::optional<std::size_t> memory_free(const std::string& root) {
  const auto machine = number_in(root + "/proc/meminfo", "MemAvailable:");
  if (!machine) return std::nullopt;
  return std::min(*machine << 10, least_of_groups(root, free_of));
}

}  // namespace mctl
