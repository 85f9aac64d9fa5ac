#include "doors/torchserve.h"

#include <algorithm>
#include <charconv>
#include <optional>
#include <utility>

#include "doors/path.h"
#include "format/text.h"
#include "registry/settings.h"
#include "registry/sources.h"

namespace mctl {
namespace {

namespace json = boost::json;

constexpr std::int64_t kPage = 100;  // models of a list
constexpr std::string_view kBy = "torchserve";

Answer with_json(const json::value& value) {
  Answer answer;
  answer.body = json::serialize(value);
  return answer;
}

Answer status(std::string text, unsigned code = 200) {
  Answer answer = with_json({{"status", std::move(text)}});
  answer.status = code;
  return answer;
}

// TorchServe's errors have a shape of their own.
Answer refused(const Error& error) {
  Answer answer = refusal(error);
  answer.body = json::serialize(json::value{
      {"code", answer.status}, {"type", "BadRequestException"}, {"message", error.text}, {"error", error.text}});
  return answer;
}

// A number in a query; nullopt: it is not there. A fault is kept.
std::optional<std::int64_t> number(const Head& head, std::string_view name, std::int64_t least, std::string& fault) {
  const std::string text = query_field(head.target, name);
  if (text.empty()) return std::nullopt;
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc{} && end == text.data() + text.size() && value >= least) return value;
  if (fault.empty())
    fault = "`" + std::string(name) + "` is `" + printable(text) + "`, allowed is a number from " +
            std::to_string(least) + " on";
  return std::nullopt;
}

std::string quoted(const std::string& text) { return '"' + text + '"'; }

json::object workers_of(const SettingsLayer& settings) {
  const InstanceRange range = settings.instances.value_or(InstanceRange{});
  return {{"minWorkers", range.min},
          {"maxWorkers", range.max},
          {"batchSize", settings.max_batch_size.value_or(0)},
          {"maxBatchDelay", settings.max_queue_delay_us.value_or(0) / 1000}};
}

}  // namespace

bool TorchServe::owns(std::span<const std::string> path) { return !path.empty() && path[0] == "models"; }

void TorchServe::serve(const ManagementRequest& request, Reply reply) {
  const auto path = request.path;
  const Verb verb = request.head.verb;
  const bool reads = verb == Verb::get || verb == Verb::head;
  const std::string version = path.size() >= 3 ? path[2] : "";
  if (path.size() == 1 && verb == Verb::post) return add(request, std::move(reply));
  if (path.size() == 1) return reply(reads ? list(request.head) : wrong_verb("GET, HEAD, POST"));
  if (path.size() == 4 && path[3] == "set-default")
    return reply(verb == Verb::put ? make_default(path[1], version) : wrong_verb("PUT"));
  if (path.size() > 3) return reply(no_such_path());
  if (verb == Verb::put) return scale(request, std::move(reply));
  if (verb == Verb::remove) return reply(remove(path[1], version));
  reply(reads ? describe(path[1], version) : wrong_verb("GET, HEAD, PUT, DELETE"));
}

// The version that a request without one gets.
std::string TorchServe::default_version(const std::string& model) const {
  const auto& shares = fleet_.models().shares(model);
  if (!shares.empty()) return std::ranges::max_element(shares, {}, &Share::percent)->version;
  const auto known = fleet_.desired().models.find(model);
  const bool any = known != fleet_.desired().models.end() && !known->second.versions.empty();
  return any ? known->second.versions.rbegin()->first : "";
}

void TorchServe::change(const ManagementRequest& request, const std::string& model, const std::string& version,
                        const json::value& patch, const std::string& done, Reply reply) {
  const bool waits = query_field(request.head.target, "synchronous") == "true";
  if (waits) {
    const auto settled = [done, reply](const Status& outcome) {
      reply(outcome ? status(done) : refused(outcome.error()));
    };
    return change_and_wait(fleet_, model, version, patch, std::string(kBy), settled);
  }
  if (auto made = fleet_.change(patch, kBy); !made) return reply(refused(made.error()));
  reply(status("Processing worker updates...", 202));
}

void TorchServe::add(const ManagementRequest& request, Reply reply) {
  const Head& head = request.head;
  std::string fault;
  json::object settings;
  const auto set = [&](const char* name, const char* ours, std::int64_t least, std::int64_t times) {
    if (const auto value = number(head, name, least, fault)) settings[ours] = *value * times;
  };
  set("initial_workers", "instances", 1, 1);
  set("batch_size", "max_batch_size", 1, 1);
  set("max_batch_delay", "max_queue_delay_us", 0, 1000);
  set("response_timeout", "worker_timeout", 1, 1);
  const std::string url = query_field(head.target, "url");
  if (url.empty() && fault.empty())
    fault = "`url` is missing: the path of a bundle below the folder of `--model-store`";
  if (!fault.empty()) return reply(refused({Code::invalid, fault}));
  const auto path = path_in_store(settings_.model_store, url);
  const auto bundle = path ? name_of_bundle(*path) : Result<BundleName>(path.error());
  if (!bundle) return reply(refused({Code::invalid, bundle.error().text}));
  const std::string asked = query_field(head.target, "model_name");
  const std::string model = asked.empty() ? bundle->name : asked;
  json::object version{{"bundle", *path}, {"digest", bundle->digest}};
  if (!settings.empty()) version["settings"] = settings;
  json::object change{{"versions", {{bundle->version, std::move(version)}}}};
  if (!fleet_.desired().models.contains(model)) {  // the first one is the default, until another is made that
    change["labels"] = {{"stable", bundle->version}};
    change["traffic"] = {{"stable", 100}};
  }
  const auto* workers = settings.if_contains("instances");
  this->change(request, model, bundle->version, {{"models", {{model, std::move(change)}}}},
               "Model " + quoted(model) + " Version: " + bundle->version + " registered with " +
                   std::to_string(workers != nullptr ? workers->as_int64() : 1) + " initial workers",
               std::move(reply));
}

Answer TorchServe::list(const Head& head) const {
  std::string fault;
  const std::int64_t limit = number(head, "limit", 1, fault).value_or(kPage);
  const std::int64_t begin = number(head, "next_page_token", 0, fault).value_or(0);
  if (!fault.empty()) return refused({Code::invalid, fault});
  json::array models;
  std::int64_t at = 0;
  bool more = false;
  for (const auto& [name, model] : fleet_.desired().models) {
    if (at++ < begin) continue;
    more = static_cast<std::int64_t>(models.size()) == limit;
    if (more) break;
    const auto version = model.versions.find(default_version(name));
    models.push_back(
        {{"modelName", name}, {"modelUrl", version != model.versions.end() ? version->second.bundle : ""}});
  }
  json::object answer{{"models", std::move(models)}};
  if (more) answer["nextPageToken"] = std::to_string(begin + limit);
  return with_json(answer);
}

Answer TorchServe::describe(const std::string& name, std::string_view asked) const {
  const auto model = fleet_.desired().models.find(name);
  if (model == fleet_.desired().models.end()) return refused(fleet_.unknown(name));
  const std::string wanted = asked.empty() ? default_version(name) : std::string(asked);
  json::array list;
  for (const auto& [version, state] : model->second.versions) {
    if (asked != "all" && version != wanted) continue;
    json::object one{{"modelName", name},
                     {"modelVersion", version},
                     {"modelUrl", state.bundle},
                     {"engine", "Torch"},
                     {"runtime", "mctl"}};
    for (const auto& field : workers_of(fleet_.settings_of(name, version))) one[field.key()] = field.value();
    one["defaultVersion"] = version == default_version(name);
    json::array workers;
    const auto served = fleet_.models().find(name, version);
    if (served) {
      const Gauges gauges = (*served)->gauges();
      for (std::size_t i = 0; i < gauges.workers.size(); ++i) {
        const bool ready = static_cast<std::int64_t>(i) < gauges.live_workers;
        workers.push_back(
            {{"id", std::to_string(gauges.workers[i])}, {"status", ready ? "READY" : "UNLOADING"}, {"gpu", false}});
      }
    }
    one["workers"] = std::move(workers);
    list.push_back(std::move(one));
  }
  if (list.empty()) return refused({Code::not_found, "model '" + name + "' has no version '" + printable(asked) + "'"});
  return with_json(list);
}

void TorchServe::scale(const ManagementRequest& request, Reply reply) {
  const std::string& model = request.path[1];
  if (!fleet_.desired().models.contains(model)) return reply(refused(fleet_.unknown(model)));
  const bool named = request.path.size() == 3;
  const std::string version = named ? request.path[2] : default_version(model);
  if (!fleet_.desired().models.at(model).versions.contains(version))
    return reply(refused({Code::not_found, "model '" + model + "' has no version '" + printable(version) + "'"}));
  std::string fault;
  const std::int64_t least = number(request.head, "min_worker", 1, fault).value_or(1);
  number(request.head, "max_worker", 1, fault);  // min_worker is what runs
  if (!fault.empty()) return reply(refused({Code::invalid, fault}));
  const json::value instances = least;
  const json::value patch{
      {"models", {{model, {{"versions", {{version, {{"settings", {{"instances", instances}}}}}}}}}}}};
  change(request, model, version, patch,
         "Workers scaled to " + std::to_string(least) + " for model: " + model + (named ? ", version: " + version : ""),
         std::move(reply));
}

Answer TorchServe::make_default(const std::string& model, const std::string& version) {
  const auto known = fleet_.desired().models.find(model);
  if (known == fleet_.desired().models.end()) return refused(fleet_.unknown(model));
  json::object traffic{{"stable", 100}};
  for (const auto& [name, share] : known->second.traffic)
    if (name != "stable") traffic[name] = nullptr;
  const json::value patch{{"models", {{model, {{"labels", {{"stable", version}}}, {"traffic", std::move(traffic)}}}}}};
  if (auto made = fleet_.change(patch, kBy); !made) return refused(made.error());
  return status("Default vesion succsesfully updated for model " + quoted(model) + " to " + quoted(version));  // sic
}

Answer TorchServe::remove(const std::string& model, std::string version) {
  const auto known = fleet_.desired().models.find(model);
  if (known == fleet_.desired().models.end()) return refused(fleet_.unknown(model));
  if (version.empty()) version = default_version(model);
  if (!known->second.versions.contains(version))
    return refused({Code::not_found, "model '" + model + "' has no version '" + printable(version) + "'"});
  const bool last = known->second.versions.size() == 1;
  const json::value without = last ? json::value() : json::value{{"versions", {{version, nullptr}}}};
  if (auto made = fleet_.change({{"models", {{model, without}}}}, kBy); !made) return refused(made.error());
  return status("Model " + quoted(model) + " unregistered");
}

}  // namespace mctl
