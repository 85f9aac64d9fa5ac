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

// The least limit of a group and of those it lies in. In a container its own group is often mounted as the root.
std::size_t least_limit(const std::string& mount, std::string group, std::string_view file) {
  std::size_t least = SIZE_MAX;
  for (;;) {
    while (group.ends_with('/')) group.pop_back();
    least = std::min(least, limit_in(mount + group + "/" + std::string(file)));
    if (group.empty()) return least;
    group.resize(group.rfind('/') == group.npos ? 0 : group.rfind('/'));
  }
}

}  // namespace

std::size_t memory_allowed(const std::string& root) {
  const std::string mount = root + "/sys/fs/cgroup";
  std::size_t bytes =
      static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {  // NUMBER:CONTROLLERS:GROUP
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == line.npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",",
                      group = line.substr(second + 1);
    if (controllers == ",,") bytes = std::min(bytes, least_limit(mount, group, "memory.max"));
    if (controllers.find(",memory,") != controllers.npos) {
      bytes = std::min(bytes, least_limit(mount + "/memory", group, "memory.limit_in_bytes"));
    }
  }
  return bytes;
}

}  // namespace mctl
