// The file that a bundle is mapped from: weights lie in it, so what changes it changes the answers.
#pragma once

#include <sys/stat.h>

#include <optional>

#include "format/descriptor.h"
#include "format/manifest.h"
#include "format/result.h"

namespace mctl {

// A copy in memory that nobody can change, not even this process. Code::host says why there is none.
Result<Descriptor> sealed_copy(int fd);

// Notices that a file was written to or cut, by its size and times; not what is written through a mapping of it.
class BundleWatch {
 public:
  BundleWatch(int fd, const Manifest& manifest);

  // Why nothing holds that was computed from the file; null: it is what it was. For good. A file that was renamed,
  // unlinked, or given another mode is what it was; where that cannot be told from its times, its digests tell.
  const Error* spoiled();

 private:
  bool is_whole(const struct stat& now);

  const int fd_;
  const Manifest& manifest_;
  struct stat first_{};
  std::optional<Error> fault_;
};

}  // namespace mctl
