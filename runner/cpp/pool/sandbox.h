// What a process gives up once it needs it no more: for good, for all its threads, and for what it starts from then on.
#pragma once

#include <string>
#include <vector>

#include "format/result.h"
#include "pool/profiles.h"

namespace mctl {

struct Confinement {
  bool strict = false;                     // as profile_of() takes it; and files are read below `readable` alone
  std::vector<std::string> readable = {};  // beside the system's and where libraries came from; for Stage::loading
};

// New privileges and system calls (seccomp); at Stage::loading capabilities and what Landlock knows of, too.
// Code::host: the kernel does not have all of it, or forbids it; what it has is given up. Landlock is missed if
// `strict`.
Status confine(Stage stage, const Confinement& wanted);

// Nobody of this user traces this process or reads its memory, and it dumps no core: the memory holds clients' data.
void hide_memory();

}  // namespace mctl
