#include "model/loaded.h"

#include <algorithm>

#include "format/layout.h"
#include "model/code.h"
#include "model/host.h"

namespace mctl {
namespace {

std::string file_name(const std::string& member) { return member.substr(member.rfind('/') + 1); }

}  // namespace

Status Loaded::open(int fd) {
  auto archive = Archive::open(fd);
  if (!archive) return archive.error();
  archive_ = *std::move(archive);
  auto manifest = read_manifest(*archive_);
  if (!manifest) return manifest.error();
  manifest_ = *std::move(manifest);
  return Done{};
}

Status Loaded::verify(bool digests) {
  if (auto runs = check_host(manifest_, this_host()); !runs) return runs;
  auto weights = Weights::map(*archive_);
  if (!weights) return weights.error();
  weights_ = *std::move(weights);
  const auto is_code = [&](const std::string& path) {
    return std::ranges::count(manifest_.variants, path, &Variant::library) > 0 ||
           std::ranges::count(manifest_.libraries, path, &OperatorLibrary::member) > 0;
  };
  for (const auto& [path, member] : manifest_.members) {
    if (!digests || is_code(path)) continue;
    if (auto same = verify_member(path); !same) return same;
  }
  return Done{};
}

// The weights where they stay mapped: the first call finds their pages in place.
Status Loaded::verify_member(const std::string& path) const {
  if (path == kWeights) return mctl::verify(manifest_, path, weights_.bytes());
  const auto mapping = archive_->map(path);
  if (!mapping) return mapping.error();
  return mctl::verify(manifest_, path, mapping->bytes());
}

Status Loaded::load(const std::string& library, int threads, const std::function<Status()>& before_code) {
  auto loaded = HostLibrary::load(library, threads);
  if (!loaded) return loaded.error();
  library_ = *std::move(loaded);
  threads_ = threads;
  lookup_.emplace(manifest_, threads);
  if (auto runs = check_libraries(manifest_, *library_); !runs) return runs;
  std::vector<UnnamedFile> operators, variants;
  for (const OperatorLibrary& listed : manifest_.libraries)
    if (auto done = copy_code(listed.member, file_name(listed.member), operators); !done) return done;
  for (const Variant& variant : manifest_.variants)
    if (auto done = copy_code(variant.library, "mctl-variant", variants); !done) return done;
  if (!variants.empty()) code_folder_ = variants.front().folder;
  if (before_code)
    if (auto done = before_code(); !done) return done;
  for (std::size_t i = 0; i < operators.size(); ++i)
    if (auto done = library_->load_operators(file_name(manifest_.libraries[i].member), operators[i]); !done)
      return done;
  for (std::size_t i = 0; i < variants.size(); ++i) {
    auto model = Model::load(*library_, manifest_.contract, manifest_.variants[i], variants[i], weights_);
    if (!model) return model.error();
    models_.push_back(*std::move(model));
  }
  return Done{};
}

// A copy, so that what was hashed is what is mapped.
Status Loaded::copy_code(const std::string& path, const std::string& name, std::vector<UnnamedFile>& copies) const {
  const auto code = archive_->read(path, SIZE_MAX);
  if (!code) return code.error();
  const auto bytes = std::as_bytes(std::span(*code));
  if (auto same = mctl::verify(manifest_, path, bytes); !same) return same.error();
  const auto file = file_of_code(name.c_str(), bytes);
  if (!file) return Error{Code::host, "cannot load `" + file_name(path) + "`: " + file.error().text};
  copies.push_back(*file);
  return Done{};
}

Status Loaded::run(std::size_t variant, std::span<const std::int64_t> dims, std::span<std::byte* const> inputs,
                   std::span<const std::span<std::byte>> outputs) {
  if (variant >= models_.size()) return Error{Code::internal, "there is no such variant"};
  const int threads = manifest_.variants[variant].threads;
  library_->set_threads(threads > 0 ? threads : threads_);
  return models_[variant].run(dims, inputs, outputs);
}

}  // namespace mctl
