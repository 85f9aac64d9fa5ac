#include "registry/sources.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>

#include "format/archive.h"
#include "format/descriptor.h"
#include "format/manifest.h"
#include "format/text.h"
#include "registry/serve_toml.h"

namespace mctl {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kAll = 100;  // versions beside the one that is used: as many as a state may keep

std::string shown_path(const fs::path& path) { return "`" + printable(path.string()) + "`"; }

std::string absolute(const std::string& path) {
  std::error_code ignored;
  const fs::path whole = fs::absolute(path, ignored);
  return ignored ? path : whole.lexically_normal().string();
}

// Names of what is in a folder, in order; what begins with a dot is hidden.
std::vector<std::string> entries_of(const fs::path& folder, std::error_code& error) {
  std::vector<std::string> names;
  for (auto entry = fs::directory_iterator(folder, error); !error && entry != fs::directory_iterator();
       entry.increment(error)) {
    std::string name = entry->path().filename().string();
    if (!name.starts_with('.')) names.push_back(std::move(name));
  }
  std::ranges::sort(names);
  return names;
}

std::vector<std::string> entries_of(const fs::path& folder) {
  std::error_code gone;
  return entries_of(folder, gone);
}

bool is_folder(const fs::path& path) {
  std::error_code gone;
  return fs::is_directory(path, gone);
}

Result<std::string> text_of_file(const std::string& path) {
  if (is_folder(path)) return Error{Code::usage, "cannot read " + shown_path(path) + ": it is a folder"};
  std::ifstream file(path, std::ios::binary);
  if (!file) return Error{Code::usage, "cannot read " + shown_path(path) + ": " + std::strerror(errno)};
  std::string text;
  for (char block[64 << 10]; file.read(block, sizeof block) || file.gcount() > 0;) {
    text.append(block, static_cast<std::size_t>(file.gcount()));
    if (text.size() > kMaxState) return Error{Code::usage, shown_path(path) + " is too large for a state"};
  }
  return text;
}

}  // namespace

Result<BundleName> name_of_bundle(const std::string& path) {
  const Descriptor file(open_to_read(path));
  if (!file) return Error{Code::damaged, "cannot open " + shown_path(path) + ": " + std::strerror(errno)};
  const auto archive = Archive::open(file.get());
  if (!archive) return Error{Code::damaged, shown_path(path) + ": " + archive.error().text};
  const auto manifest = read_manifest(*archive);
  if (!manifest) return Error{Code::damaged, shown_path(path) + ": " + manifest.error().text};
  return BundleName{manifest->name, manifest->version, manifest->digest};
}

Result<Owned> owned_by_bundles(std::span<const std::string> paths) {
  Owned owned;
  std::optional<Error> first;
  for (const std::string& path : paths) {
    const auto bundle = name_of_bundle(path);
    if (!bundle) {
      owned.left_out.push_back(bundle.error().text);
      if (!first) first = bundle.error();
      continue;
    }
    ModelState& model = owned.state.models[bundle->name];
    model.keep = kAll;
    if (!model.versions.try_emplace(bundle->version, VersionState{absolute(path), bundle->digest, {}}).second)
      return Error{Code::usage, "model '" + bundle->name + "', version '" + bundle->version + "' is given twice"};
  }
  if (owned.state.models.empty() && first) return *first;
  std::string fault;
  for (const auto& [name, model] : owned.state.models) check_model(name, model, fault);
  if (!fault.empty()) return Error{Code::usage, printable(fault)};
  return owned;
}

Result<Owned> owned_by_file(const std::string& path) {
  const auto text = text_of_file(path);
  if (!text) return text.error();
  auto state = parse_state(*text);
  if (!state) return Error{Code::usage, shown_path(path) + ", " + state.error().text};
  const fs::path folder = fs::path(absolute(path)).parent_path();
  for (auto& [name, model] : state->models)
    for (auto& [version, its] : model.versions) its.bundle = (folder / its.bundle).lexically_normal().string();
  auto whole = completed(*std::move(state));
  if (!whole) return Error{Code::usage, shown_path(path) + ": " + whole.error().text};
  Owned owned;
  owned.state = *std::move(whole);
  return owned;
}

Result<Owned> Folder::look() {
  std::error_code error;
  const auto names = entries_of(path_, error);
  if (error) return Error{Code::usage, "cannot read the folder " + shown_path(path_) + ": " + error.message()};
  seen_before_ = std::exchange(seen_, {});
  Owned owned;
  for (const std::string& name : names)
    if (is_folder(fs::path(path_) / name)) look_at_model(name, owned);
  return owned;
}

void Folder::look_at_model(const std::string& name, Owned& owned) {
  const fs::path folder = fs::path(path_) / name;
  const auto leave_out = [&](const std::string& why) { owned.left_out.push_back(shown_path(folder) + ": " + why); };
  const auto entries = entries_of(folder);
  if (std::ranges::find(entries, "serve.toml") != entries.end()) {
    const auto text = text_of_file((folder / "serve.toml").string());
    const auto layer = text ? parse_serve_toml(*text) : Result<SettingsLayer>(text.error());
    if (!layer) return leave_out("serve.toml, " + layer.error().text);
    owned.layers[name] = *layer;
  }
  for (const std::string& version : entries)
    if (is_folder(folder / version)) look_at_version(name, version, owned);
  const auto model = owned.state.models.find(name);
  if (model == owned.state.models.end()) return void(owned.layers.erase(name));
  std::string fault;
  check_model(name, model->second, fault);
  if (fault.empty()) return;
  leave_out(fault);
  owned.state.models.erase(name);
  owned.layers.erase(name);
}

void Folder::look_at_version(const std::string& name, const std::string& version, Owned& owned) {
  const fs::path folder = fs::path(path_) / name / version;
  std::vector<std::string> bundles;
  for (const std::string& file : entries_of(folder))
    if (file.ends_with(".pt2")) bundles.push_back((folder / file).string());
  if (bundles.empty()) return;
  if (bundles.size() > 1)
    return owned.left_out.push_back(shown_path(folder) + ": it has " + std::to_string(bundles.size()) +
                                    " files `*.pt2`, and a version is one bundle");
  const auto& bundle = read(bundles.front());
  if (!bundle) return owned.left_out.push_back(bundle.error().text);
  const std::string path = absolute(bundles.front());
  owned.state.models[name].versions[version] = {path, bundle->digest, {}};
  owned.touched_ns[path] = seen_.at(bundles.front()).stamp.changed_ns;
}

const Result<BundleName>& Folder::read(const std::string& path) {
  Stamp stamp;
  struct stat status{};
  if (::stat(path.c_str(), &status) == 0)
    stamp = {status.st_ino, status.st_size, status.st_ctim.tv_sec * 1'000'000'000 + status.st_ctim.tv_nsec};
  const auto before = seen_before_.find(path);
  const bool same = before != seen_before_.end() && before->second.stamp == stamp;
  return seen_.insert_or_assign(path, same ? before->second : Seen{stamp, name_of_bundle(path)}).first->second.bundle;
}

Result<Owned> model_in_folder(const std::string& folder, const std::string& name) {
  auto owned = Folder(folder).look();
  if (!owned) return owned.error();
  std::erase_if(owned->state.models, [&](const auto& model) { return model.first != name; });
  if (!owned->state.models.empty()) return owned;
  for (const std::string& why : owned->left_out)
    if (why.find("/" + name + "/") != why.npos) return Error{Code::invalid, why};
  return Error{Code::not_found, "there is no model '" + printable(name) + "' in " + shown_path(folder)};
}

}  // namespace mctl
