// What this process gives up once it needs it no more: new privileges, core dumps, system calls (seccomp).
#pragma once

#include "format/result.h"

namespace mctl {

enum class Role { front, worker };

// For all threads, for good, and for what the process starts from now on. `front`: what neither a front nor a worker at
// any time of its life needs. `worker`: that, and what a model has no use for when it runs. Code::host where the kernel
// has no seccomp, or forbids it.
Status confine(Role role);

}  // namespace mctl
