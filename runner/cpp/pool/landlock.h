// Landlock: what a thread and those that it starts may no longer reach, whatever call they use.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "format/result.h"

namespace mctl {

// No changes to files, no TCP, no signals and no tracing beyond this process; as much of that as the kernel knows.
// `readable`: only these files, and what lies in these folders, can be opened from now on; those that are not there are
// passed over. Code::host where there is no Landlock. PR_SET_NO_NEW_PRIVS has to be set.
Status fence_in(const std::optional<std::vector<std::string>>& readable);

}  // namespace mctl
