#include "doors/management.h"

#include <algorithm>
#include <charconv>
#include <utility>

#include "doors/handler_paths.h"
#include "doors/path.h"
#include "format/json.h"
#include "format/text.h"
#include "registry/merge_patch.h"
#include "registry/rollout.h"

namespace mctl {
namespace {

namespace json = boost::json;

Answer with_json(const json::value& value) {
  Answer answer;
  answer.body = json::serialize(value);
  return answer;
}

Result<json::value> parsed(const std::string& body) {
  if (body.empty()) return json::value(json::object());
  auto value = parse_json(body);
  if (!value) return Error{Code::invalid, value.error().text};
  return value;
}

std::string_view word_of(ResidentPhase phase) {
  constexpr std::string_view words[] = {"loading", "ready", "draining", "failed"};
  return words[static_cast<std::size_t>(phase)];
}

std::int64_t percent_of(const Models& models, const Fleet::Held& held) {
  const auto& shares = models.shares(held.as.model);
  const auto found = std::ranges::find(shares, held.as.version, &Share::version);
  return held.as.serving && found != shares.end() ? found->percent : 0;
}

json::object described(const Fleet& fleet, const Fleet::Held& held) {
  json::object object{{"phase", word_of(held.as.phase)}, {"bundle", held.as.bundle}, {"digest", held.as.digest}};
  if (!held.model) {
    object["why"] = held.failure.text;
    return object;
  }
  const Gauges gauges = held.model->gauges();
  object["percent"] = percent_of(fleet.models(), held);
  object["workers"] = gauges.live_workers;
  object["queue_rows"] = gauges.queue_rows;
  if (const Status ready = held.model->ready(); !ready) object["why"] = ready.error().text;
  const Shadowed& shadowed = held.model->metrics().shadowed;
  if (shadowed.compared + shadowed.dropped > 0)
    object["shadow"] = {{"compared", shadowed.compared},
                        {"differed", shadowed.differed},
                        {"dropped", shadowed.dropped},
                        {"last", shadowed.last},
                        {"requests", json::value_from(shadowed.ids)}};
  return object;
}

// Triton's word for it, and the reason.
std::pair<std::string_view, std::string> triton_state(const Fleet::Held& held) {
  if (!held.model) return {"UNAVAILABLE", held.failure.text};
  if (held.as.phase == ResidentPhase::draining) return {"UNLOADING", ""};
  if (held.as.phase == ResidentPhase::loading) return {"LOADING", ""};
  const Status ready = held.model->ready();
  return ready ? std::pair<std::string_view, std::string>{"READY", ""}
               : std::pair<std::string_view, std::string>{"UNAVAILABLE", ready.error().text};
}

}  // namespace

std::string query_field(std::string_view target, std::string_view name) {
  const std::size_t begin = target.find('?');
  std::string_view query = begin == target.npos ? "" : target.substr(begin + 1);
  query = query.substr(0, query.find('#'));
  while (!query.empty()) {
    const std::string_view field = query.substr(0, query.find('&'));
    query.remove_prefix(std::min(field.size() + 1, query.size()));
    const std::size_t equals = std::min(field.find('='), field.size());
    if (decoded(field.substr(0, equals)) != name) continue;
    std::string value(field.substr(std::min(equals + 1, field.size())));
    std::ranges::replace(value, '+', ' ');
    return decoded(value);
  }
  return {};
}

void change_and_wait(Fleet& fleet, const std::string& model, const std::string& version, const json::value& patch,
                     std::string by, std::function<void(const Status&)> done) {
  const auto& models = fleet.desired().models;
  const auto there = models.find(model);
  const json::value before = there != models.end() ? json::value(model_to_json(there->second)) : json::value();
  if (auto made = fleet.change(patch, by); !made) return done(made);
  fleet.forget_failures(model);
  const json::value after = model_to_json(fleet.desired().models.at(model));
  fleet.when_settled(model, version, [&fleet, model, before, after, by, done = std::move(done)](const Status& outcome) {
    const auto now = fleet.desired().models.find(model);
    if (!outcome && now != fleet.desired().models.end() && json::value(model_to_json(now->second)) == after) {
      const json::value back = before.is_null() ? json::value() : merge_difference(after, before);
      static_cast<void>(static_cast<bool>(fleet.change({{"models", {{model, back}}}}, by + ", taken back")));
    }
    done(outcome ? outcome : Status(Error{Code::invalid, "failed to load '" + model + "': " + outcome.error().text}));
  });
}

std::string repository_index(const Fleet& fleet, bool only_ready) {
  json::array index;
  for (const auto& [name, model] : fleet.desired().models) {
    for (const auto& [version, state] : model.versions) {
      std::pair<std::string_view, std::string> told{"UNAVAILABLE", "it is not in memory"};
      if (fleet.is_asleep(name, version)) told = {"READY", "it is loaded when it is asked for"};
      for (const auto& held : fleet.held())
        if (held->as.model == name && held->as.version == version && told.first != "READY") told = triton_state(*held);
      if (only_ready && told.first != "READY") continue;
      index.push_back({{"name", name}, {"version", version}, {"state", told.first}, {"reason", told.second}});
    }
  }
  return json::serialize(index);
}

bool Management::owns(std::span<const std::string> path) {
  if (path.size() >= 2 && path[0] == "admin" && path[1] == "v1") return true;
  return path.size() >= 2 && path[0] == "v2" && path[1] == "repository";
}

void Management::serve(const ManagementRequest& request, Reply reply) {
  const auto path = request.path;
  const Verb verb = request.head.verb;
  const auto is = [&](std::size_t at, std::string_view name) { return path.size() > at && path[at] == name; };
  const bool reads = verb == Verb::get || verb == Verb::head;
  if (is(0, "admin") && path.size() == 3 && is(2, "state")) return state(request, reply);
  if (is(0, "admin") && path.size() == 3 && is(2, "models")) return reply(reads ? models() : wrong_verb("GET, HEAD"));
  if (is(0, "admin") && path.size() == 3 && is(2, "events"))
    return reply(reads ? events(request.head) : wrong_verb("GET, HEAD"));
  if (is(0, "admin") && path.size() == 5 && is(2, "models") && is(4, "rollback"))
    return reply(verb == Verb::post ? rolled_back(path[3]) : wrong_verb("POST"));
  const bool of_model = is(0, "v2") && path.size() == 5 && is(2, "models");
  if (of_model && is(4, "load"))
    return verb == Verb::post ? load(path[3], request.body, std::move(reply)) : reply(wrong_verb("POST"));
  if (of_model && is(4, "unload")) return reply(verb == Verb::post ? unloaded(path[3]) : wrong_verb("POST"));
  reply(no_such_path());
}

void Management::state(const ManagementRequest& request, const Reply& reply) {
  const Verb verb = request.head.verb;
  if (verb == Verb::patch) return reply(changed(request));
  if (verb != Verb::get && verb != Verb::head) return reply(wrong_verb("GET, HEAD, PATCH"));
  Answer answer;
  answer.body = print_state(fleet_.desired());
  answer.fields = "ETag: " + fleet_.etag() + "\r\n";
  reply(std::move(answer));
}

Answer Management::changed(const ManagementRequest& request) {
  if (auto same = check_if_match(request.head.if_match, fleet_.etag()); !same) return refusal(same.error());
  auto patch = parsed(request.body);
  if (patch) patch = with_bundles_found(*std::move(patch), settings_.model_store);
  if (!patch) return refusal(patch.error());
  if (auto made = fleet_.change(*patch, "admin"); !made) return refusal(made.error());
  Answer answer;
  answer.body = print_state(fleet_.desired());
  answer.fields = "ETag: " + fleet_.etag() + "\r\n";
  return answer;
}

Answer Management::models() const {
  json::object models;
  for (const auto& [name, model] : fleet_.desired().models) {
    json::object versions;
    for (const auto& [version, state] : model.versions)
      versions[version] = {{"phase", fleet_.is_asleep(name, version) ? "on demand" : "not in memory"},
                           {"bundle", state.bundle},
                           {"percent", 0}};
    json::object& told = (models[name] = {{"versions", std::move(versions)}}).get_object();
    if (const std::string where = rollouts_.told(name); !where.empty()) told["rollout"] = where;
  }
  for (const auto& held : fleet_.held()) {
    json::value& model = models[held->as.model];
    if (model.is_null()) model = {{"versions", json::object()}};
    json::value& version = model.at("versions").get_object()[held->as.version];
    // Of several, the one that answers.
    if (version.is_object() && version.get_object().contains("workers") && !held->as.serving) continue;
    version = described(fleet_, *held);
  }
  for (auto& [name, model] : models)
    if (const Status ready = fleet_.ready(name, ""); !ready) model.get_object()["why"] = ready.error().text;
  return with_json({{"schema", "mctl.models/1"}, {"models", std::move(models)}});
}

Answer Management::rolled_back(const std::string& name) {
  const auto model = fleet_.desired().models.find(name);
  if (model == fleet_.desired().models.end()) return refusal(fleet_.unknown(name));
  const auto patch = rollback(name, model->second);
  if (!patch) return refusal(patch.error());
  if (auto made = fleet_.change(*patch, "admin, rollback", ChangedBy::server); !made) return refusal(made.error());
  return with_json(model_to_json(fleet_.desired().models.at(name)));
}

Result<std::uint64_t> Management::events_seen(std::string_view head, std::string_view target) {
  std::string seen = query_field(target, "after");
  for (const auto& [name, value] : lines_of(head))
    if (name == "last-event-id") seen = value;
  std::uint64_t id = 0;
  const auto [end, error] = std::from_chars(seen.data(), seen.data() + seen.size(), id);
  if (seen.empty() || (error == std::errc{} && end == seen.data() + seen.size())) return id;
  return Error{Code::invalid, "`after` is `" + printable(seen.substr(0, 64)) + "`, allowed is the id of an event"};
}

// Those that are kept, of which the client has not heard: it asks again with the last one's id.
Answer Management::events(const Head& head) const {
  const auto after = events_seen("", head.target);
  if (!after) return refusal(after.error());
  json::array events;
  for (const Event& event : fleet_.events().kept())
    if (event.id > *after) events.push_back(event_to_json(event));
  return with_json({{"schema", "mctl.events/1"}, {"events", std::move(events)}});
}

void Management::load(const std::string& model, const std::string& body, Reply reply) {
  if (fleet_.owner() != Owner::state) {
    const bool folder = fleet_.owner() == Owner::folder;
    return reply(refusal({Code::conflict, std::string("what is served is what the ") +
                                              (folder ? "folder has: put the bundle there"
                                                      : "file of `--config` says: change it, and send SIGHUP")}));
  }
  const auto value = parsed(body);
  const auto request = value ? load_request(model, *value, settings_) : Result<LoadRequest>(value.error());
  if (!request) return reply(refusal(request.error()));
  change_and_wait(fleet_, model, request->version, request->patch, "triton, load",
                  [reply](const Status& done) { reply(done ? Answer{} : refusal(done.error())); });
}

Answer Management::unloaded(const std::string& name) {
  if (!fleet_.desired().models.contains(name)) return refusal(fleet_.unknown(name));
  if (auto made = fleet_.change({{"models", {{name, nullptr}}}}, "triton, unload"); !made) return refusal(made.error());
  return Answer{};
}

}  // namespace mctl
