// A bundle that can be called: what workers and `measure` load, in three steps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "format/archive.h"
#include "format/lookup.h"
#include "format/manifest.h"
#include "format/result.h"
#include "format/weights.h"
#include "model/aoti.h"
#include "model/host_library.h"

namespace mctl {

// It stays where it is: the models point into it. One thread at a time uses it.
class Loaded {
 public:
  Loaded() = default;
  Loaded(const Loaded&) = delete;
  Loaded& operator=(const Loaded&) = delete;

  Status open(int fd);          // the directory and the manifest; the descriptor stays the caller's
  Status verify(bool digests);  // does it run here? Maps the weights; `digests`: of all members but code

  // The host library (`library` as HostLibrary::load takes it) and the variants, whose code is always hashed.
  // `threads`: of OpenMP, for variants that do not set their own. `before_code` is called before any of the bundle's
  // code runs, which some does as soon as it is loaded.
  Status load(const std::string& library, int threads, const std::function<Status()>& before_code = {});

  const Archive& archive() const { return *archive_; }
  const Manifest& manifest() const { return manifest_; }
  // Where the code had to go that it is loaded from; empty: it is in memory.
  const std::string& code_folder() const { return code_folder_; }

  // The variant that a server runs at these sizes with as many threads; nullopt: none covers them.
  std::optional<std::size_t> variant(std::span<const std::int64_t> dims) const { return lookup_->variant(dims); }

  void reset() { weights_.reset(); }  // the state, as the bundle has it

  // One call, as Model::run; the variant covers these sizes.
  Status run(std::size_t variant, std::span<const std::int64_t> dims, std::span<std::byte* const> inputs,
             std::span<const std::span<std::byte>> outputs);

 private:
  Status verify_member(const std::string& path) const;
  Status copy_code(const std::string& path, const std::string& name, std::vector<UnnamedFile>& copies) const;

  std::optional<Archive> archive_;
  Manifest manifest_;
  Weights weights_;
  std::optional<HostLibrary> library_;
  std::vector<Model> models_;
  std::string code_folder_;
  std::optional<Lookup> lookup_;
  int threads_ = 1;
};

}  // namespace mctl
