// Which system calls a process may make, at each stage of its life.
#pragma once

#include "pool/filter.h"

namespace mctl {

// A front gives up its part before it starts the first worker, and workers inherit that. A worker gives up what loading
// and running a model does not need before it loads a bundle's code, which can be hostile as soon as it is loaded; the
// rest when it is ready. Another kind of process, one that runs Python handlers for example, gets a stage of its own;
// one that has to start programs is forked before the front confines itself.
enum class Stage { front, loading, ready };

// `strict`: what a model needs is permitted and all else refused, from `loading` on; else what no model needs is
// refused.
Profile profile_of(Stage stage, bool strict);

// Such a build may use ptrace and prctl: its search for leaks at exit starts a process that looks into this one.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

}  // namespace mctl
