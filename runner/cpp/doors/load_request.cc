#include "doors/load_request.h"

#include <algorithm>
#include <boost/beast/core/detail/base64.hpp>
#include <filesystem>
#include <optional>
#include <span>

#include "format/json.h"
#include "format/sha256.h"
#include "format/text.h"
#include "registry/reading.h"
#include "registry/sources.h"
#include "registry/state.h"
#include "registry/store.h"

namespace mctl {
namespace {

namespace json = boost::json;
namespace fs = std::filesystem;
namespace base64 = boost::beast::detail::base64;

constexpr std::string_view kFile = "file:";
constexpr std::int64_t kMost = INT32_MAX;

Error invalid(std::string_view why) { return {Code::invalid, printable(why)}; }

// --- Triton's model configuration -----------------------------------------------------------------------------------

void read_queue(const json::value& value, const std::string& where, json::object& settings, std::string& fault) {
  only_fields(value, {"max_queue_size", "default_timeout_microseconds"}, where, fault);
  const auto* object = value.if_object();
  if (object == nullptr) return;
  if (const auto* size = object->if_contains("max_queue_size"))
    settings["max_queue_size"] = integer_in(*size, 1, kMost, where + ".max_queue_size", fault);
  if (const auto* timeout = object->if_contains("default_timeout_microseconds"))
    settings["default_timeout_ms"] = std::max<std::int64_t>(
        1, integer_in(*timeout, 1, kMost, where + ".default_timeout_microseconds", fault) / 1000);
}

void read_batching(const json::value& value, json::object& settings, std::string& fault) {
  const std::string where = "config.dynamic_batching";
  only_fields(value, {"max_queue_delay_microseconds", "preferred_batch_size", "default_queue_policy"}, where, fault);
  const auto* object = value.if_object();
  if (object == nullptr) return;
  if (const auto* delay = object->if_contains("max_queue_delay_microseconds"))
    settings["max_queue_delay_us"] = integer_in(*delay, 0, kMost, where + ".max_queue_delay_microseconds", fault);
  if (const auto* sizes = object->if_contains("preferred_batch_size")) settings["allowed_batch_sizes"] = *sizes;
  if (const auto* policy = object->if_contains("default_queue_policy"))
    read_queue(*policy, where + ".default_queue_policy", settings, fault);
}

void read_instances(const json::value& value, json::object& settings, std::string& fault) {
  const auto* groups = value.if_array();
  if (groups == nullptr) return keep_fault(fault, "config.instance_group", "is no list");
  std::int64_t count = 0;
  for (const auto& group : *groups) {
    only_fields(group, {"count", "kind", "name"}, "config.instance_group", fault);
    const auto* object = group.if_object();
    const auto* number = object != nullptr ? object->if_contains("count") : nullptr;
    count += number != nullptr ? integer_in(*number, 1, 256, "config.instance_group.count", fault) : 1;
    const auto* kind = object != nullptr ? object->if_contains("kind") : nullptr;
    if (kind != nullptr && *kind != json::value("KIND_CPU") && *kind != json::value("KIND_AUTO"))
      keep_fault(fault, "config.instance_group.kind", "is " + shown(*kind) + ", allowed is KIND_CPU");
  }
  if (count > 0) settings["instances"] = count;
}

// The settings that a configuration means.
Result<json::object> settings_of_config(const std::string& model, const json::value& text) {
  const auto* written = text.if_string();
  if (written == nullptr) return invalid("parameters.config is no text: it is a model configuration as JSON");
  const auto config = parse_json(std::string_view(*written));
  if (!config) return invalid("parameters.config: " + config.error().text);
  std::string fault;
  json::object settings;
  only_fields(*config,
              {"name", "platform", "backend", "max_batch_size", "instance_group", "dynamic_batching", "input", "output",
               "version_policy"},
              "config", fault);
  if (const auto* object = config->if_object()) {
    const auto* name = object->if_contains("name");
    if (name != nullptr && *name != json::value("") && *name != json::value(model))
      keep_fault(fault, "config.name", "is " + shown(*name) + ", and the request is for `" + model + '`');
    if (const auto* size = object->if_contains("max_batch_size"))
      settings["max_batch_size"] =
          std::max<std::int64_t>(1, integer_in(*size, 0, kMost, "config.max_batch_size", fault));
    if (const auto* groups = object->if_contains("instance_group")) read_instances(*groups, settings, fault);
    if (const auto* batching = object->if_contains("dynamic_batching")) read_batching(*batching, settings, fault);
  }
  if (!fault.empty()) return invalid(fault);
  return settings;
}

// --- bundles in requests --------------------------------------------------------------------------------------------

Result<std::string> decoded_base64(std::string_view text) {
  std::string bytes(base64::decoded_size(text.size()), '\0');
  const auto [written, read] = base64::decode(bytes.data(), text.data(), text.size());
  const auto rest = text.substr(read);
  if (rest.find_first_not_of("=\r\n") != rest.npos) return invalid("parameters.file is no base64");
  bytes.resize(written);
  return bytes;
}

// `file:1/bundle.pt2` is version 1.
Result<std::string> version_of_file(std::string_view key) {
  const std::string_view path = key.substr(kFile.size());
  const std::string_view version = path.substr(0, path.find('/'));
  if (path.find('/') == path.npos || version.empty())
    return invalid("`" + std::string(key.substr(0, 256)) + "` names no version: write `file:1/bundle.pt2`");
  return std::string(version);
}

Result<VersionState> kept_in_store(const std::string& store, std::string_view key, const json::value& value) {
  if (store.empty())
    return invalid("this server keeps no bundles that come in requests: start it with `--store FOLDER`");
  const auto* text = value.if_string();
  if (text == nullptr) return invalid("parameters.file is no text");
  const auto bytes = decoded_base64(*text);
  if (!bytes) return bytes.error();
  const std::string path =
      (fs::absolute(store) / (sha256(std::as_bytes(std::span(*bytes))) + ".pt2")).lexically_normal().string();
  if (auto written = write_whole_file(path, *bytes); !written) return written.error();
  const auto bundle = name_of_bundle(path);
  if (bundle) return VersionState{path, bundle->digest, {}};
  std::error_code gone;
  fs::remove(path, gone);
  const std::string& why = bundle.error().text;
  return invalid("`" + std::string(key.substr(0, 256)) + "` is no bundle" +
                 why.substr(std::min(why.find(": "), why.size())));
}

Result<ModelState> files_of(const json::object& parameters, const ManagementSettings& settings) {
  ModelState model;
  for (const auto& [key, value] : parameters) {
    if (!key.starts_with(kFile)) continue;
    const auto version = version_of_file(key);
    if (!version) return version.error();
    auto bundle = kept_in_store(settings.store, key, value);
    if (!bundle) return bundle.error();
    model.versions[*version] = *std::move(bundle);
  }
  return model;
}

}  // namespace

Result<LoadRequest> load_request(const std::string& name, const json::value& body, const ManagementSettings& settings) {
  std::string fault;
  only_fields(body, {"parameters"}, "", fault);
  if (!fault.empty()) return invalid(fault);
  static const json::object none;
  const auto* asked = body.get_object().if_contains("parameters");
  if (asked != nullptr && !asked->is_object()) return invalid("parameters is no object");
  const json::object& parameters = asked != nullptr ? asked->get_object() : none;
  for (const auto& [key, value] : parameters)
    if (key != "config" && !key.starts_with(kFile))
      return invalid("parameters." + std::string(key) + " is not known: allowed are `config` and `file:VERSION/NAME`");
  auto model = files_of(parameters, settings);
  if (!model) return model.error();
  if (model->versions.empty()) {
    if (settings.model_store.empty())
      return invalid("this server loads no files by request: start it with `--model-store FOLDER`");
    auto owned = model_in_folder(settings.model_store, name);
    if (!owned) return owned.error();
    model->versions = std::move(owned->state.models.at(name).versions);
    model->settings = owned->layers[name];
  }
  json::object change = model_to_json(*model);
  json::object patch{{"versions", change["versions"]}};
  if (const auto* its = change.if_contains("settings")) patch["settings"] = *its;
  if (const auto* config = parameters.if_contains("config")) {
    const auto told = settings_of_config(name, *config);
    if (!told) return told.error();
    patch["settings"] = *told;
  }
  return LoadRequest{{{"models", {{name, std::move(patch)}}}}, model->versions.rbegin()->first};
}

Result<std::string> path_in_store(const std::string& model_store, std::string_view path) {
  if (path.find("://") != path.npos)
    return invalid("`" + std::string(path) + "` is a URL: this server loads files of its own machine only");
  if (model_store.empty())
    return invalid("this server loads no files by request: start it with `--model-store FOLDER`");
  std::error_code error;
  const fs::path root = fs::canonical(model_store, error);
  if (error) return invalid("the folder of `--model-store` cannot be read: " + error.message());
  const fs::path whole = fs::canonical(root / fs::path(path), error);  // links followed
  const auto ends = std::ranges::mismatch(root, whole);
  if (error || ends.in1 != root.end())
    return invalid("there is no file `" + std::string(path) + "` below the folder of `--model-store`");
  return whole.string();
}

Result<json::value> with_bundles_found(json::value patch, const std::string& model_store) {
  auto* const models = patch.is_object() ? patch.get_object().if_contains("models") : nullptr;
  if (models == nullptr || !models->is_object()) return patch;
  for (auto& [name, model] : models->get_object()) {
    auto* const versions = model.is_object() ? model.get_object().if_contains("versions") : nullptr;
    if (versions == nullptr || !versions->is_object()) continue;
    for (auto& [version, state] : versions->get_object()) {
      auto* const bundle = state.is_object() ? state.get_object().if_contains("bundle") : nullptr;
      if (bundle == nullptr || !bundle->is_string()) continue;
      const auto path = path_in_store(model_store, bundle->get_string());
      if (!path) return path.error();
      const auto named = name_of_bundle(*path);
      if (!named) return invalid(named.error().text);
      *bundle = *path;
      if (!state.get_object().contains("digest")) state.get_object()["digest"] = named->digest;
    }
  }
  return patch;
}

}  // namespace mctl
