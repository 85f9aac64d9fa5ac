// What there is to be served: bundles on the command line, a folder, or a file that says it.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "format/result.h"
#include "registry/fleet.h"

namespace mctl {

// What a bundle's manifest says of itself. Code::damaged: it cannot be read, or is not whole.
struct BundleName {
  std::string name, version, digest;
};
Result<BundleName> name_of_bundle(const std::string& path);

// Of bundles on the command line, by the names and versions of their manifests; all of them are kept in memory. What
// cannot be read is left out, if there is something else. Code::usage: a name and version twice, or no bundle at all.
Result<Owned> owned_by_bundles(std::span<const std::string> paths);

// The file of `--config`: a state (state.h). Paths in it are from the file's folder. Code::usage.
Result<Owned> owned_by_file(const std::string& path);

// A folder: `NAME/VERSION/*.pt2`, and maybe `NAME/serve.toml`. A bundle counts once it is whole, and is read again when
// its file has changed.
class Folder {
 public:
  explicit Folder(std::string path) : path_(std::move(path)) {}

  Result<Owned> look();  // Code::usage: the folder cannot be read

 private:
  struct Stamp {
    std::uint64_t inode = 0;
    std::int64_t size = 0, changed_ns = 0;
    bool operator==(const Stamp&) const = default;
  };
  struct Seen {
    Stamp stamp;
    Result<BundleName> bundle = Error{};
  };

  void look_at_model(const std::string& name, Owned& owned);
  void look_at_version(const std::string& name, const std::string& version, Owned& owned);
  const Result<BundleName>& read(const std::string& path);

  const std::string path_;
  std::map<std::string, Seen> seen_, seen_before_;  // bundles by path
};

// One model of a folder, as it is now. Code::not_found: there is none.
Result<Owned> model_in_folder(const std::string& folder, const std::string& name);

}  // namespace mctl
