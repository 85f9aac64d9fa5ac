// Files without a name, gone with their last descriptor: shared memory, and code that is loaded from memory.
#pragma once

#include <functional>
#include <string>

#include "format/result.h"

namespace mctl {

struct UnnamedFile {
  int fd = -1;
  std::string folder;  // empty: it is in memory
};

// A file, open to read and write, that `use` took: in memory (memfd) or, where that is forbidden or of no use, in the
// first work folder that will do: $XDG_RUNTIME_DIR, /dev/shm, $TMPDIR, /tmp. Code::host says why there is none.
Result<UnnamedFile> unnamed_file(const char* name, const std::function<Status(const UnnamedFile&)>& use);

}  // namespace mctl
