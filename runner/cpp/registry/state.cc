#include "registry/state.h"

#include <algorithm>
#include <span>

#include "format/contract.h"
#include "format/json.h"
#include "format/sha256.h"
#include "format/text.h"
#include "registry/reading.h"

namespace mctl {
namespace {

namespace json = boost::json;

constexpr std::string_view kPhases[] = {"loading", "shadow", "step", "promoted", "taken_back"};
constexpr std::string_view kNameRule = "allowed are letters, digits, `_`, `.` and `-`, at most 256";
constexpr std::size_t kMaxPath = 4096;
constexpr std::int64_t kMostKept = 100, kLongestHold = 30 * 86'400, kMostRequests = 1'000'000'000;
constexpr std::size_t kLineLength = 100;  // what is shorter is printed on one line

bool is_digit(char c) { return '0' <= c && c <= '9'; }
bool is_number(std::string_view name) { return std::ranges::all_of(name, is_digit); }

// --- reading -------------------------------------------------------------------------------------------------------

std::string text_in(const json::value& value, const std::string& where, std::string& fault) {
  const auto* text = value.if_string();
  if (text != nullptr && !text->empty() && text->size() <= kMaxPath) return std::string(*text);
  keep_fault(fault, where, "is " + shown(value) + ", allowed is a text of 1.." + std::to_string(kMaxPath) + " bytes");
  return {};
}

// f(key, item, where) for each field of an object that may be missing.
template <class F>
void each_in(const json::object& object, std::string_view name, const std::string& where, std::string& fault, F f) {
  const auto* value = object.if_contains(name);
  if (value == nullptr) return;
  const std::string at = (where.empty() ? "" : where + '.') + std::string(name);
  const auto* items = value->if_object();
  if (items == nullptr) return keep_fault(fault, at, "is no object");
  for (const auto& [key, item] : *items) f(std::string(key), item, at + '.' + std::string(key));
}

VersionState version_from_json(const json::value& value, const std::string& where, std::string& fault) {
  VersionState version;
  only_fields(value, {"bundle", "digest", "settings"}, where, fault);
  const auto* object = value.if_object();
  if (object == nullptr) return version;
  if (const auto* bundle = object->if_contains("bundle"))
    version.bundle = text_in(*bundle, where + ".bundle", fault);
  else
    keep_fault(fault, where, "has no `bundle`: the path of the file to serve");
  if (const auto* digest = object->if_contains("digest")) {
    version.digest = text_in(*digest, where + ".digest", fault);
    const auto is_hex = [](char c) { return is_digit(c) || ('a' <= c && c <= 'f'); };
    if (version.digest.size() != 64 || !std::ranges::all_of(version.digest, is_hex))
      keep_fault(fault, where + ".digest", "is no SHA-256 in 64 lower-case hexadecimal digits");
  }
  if (const auto* settings = object->if_contains("settings"))
    version.settings = settings_from_json(*settings, where + ".settings", fault);
  return version;
}

Shadowing shadow_from_json(const json::value& value, const std::string& where, std::string& fault) {
  Shadowing shadow;
  only_fields(value, {"version", "percent"}, where, fault);
  const auto* object = value.if_object();
  if (object == nullptr) return shadow;
  if (const auto* version = object->if_contains("version"))
    shadow.version = text_in(*version, where + ".version", fault);
  else
    keep_fault(fault, where, "has no `version`");
  if (const auto* percent = object->if_contains("percent"))
    shadow.percent = integer_in(*percent, 1, 100, where + ".percent", fault);
  return shadow;
}

Gates gates_from_json(const json::value& value, const std::string& where, std::string& fault) {
  Gates gates;
  only_fields(value, {"errors", "p99", "mismatch"}, where, fault);
  const auto* object = value.if_object();
  if (object == nullptr) return gates;
  const auto gate = [&](std::string_view name, double least, double most, std::optional<double>& limit) {
    if (const auto* item = object->if_contains(name))
      limit = number_in(*item, least, most, where + '.' + std::string(name), fault);
  };
  gate("errors", 0, 1, gates.errors);
  gate("p99", 1, 1000, gates.p99);
  gate("mismatch", 0, 1, gates.mismatch);
  return gates;
}

std::vector<std::int64_t> steps_from_json(const json::value& value, const std::string& where, std::string& fault) {
  std::vector<std::int64_t> steps;
  const auto* list = value.if_array();
  if (list == nullptr || list->empty()) return keep_fault(fault, where, "is no list of percents"), steps;
  for (const auto& item : *list) steps.push_back(integer_in(item, 1, 100, where, fault));
  if (std::ranges::adjacent_find(steps, std::greater_equal()) != steps.end() || steps.back() != 100)
    keep_fault(fault, where, "is " + shown(value) + ", allowed are ascending percents that end with 100");
  return steps;
}

RolloutPhase phase_from_json(const json::value& value, const std::string& where, std::string& fault) {
  const auto* text = value.if_string();
  const auto found = text != nullptr ? std::ranges::find(kPhases, std::string_view(*text)) : std::end(kPhases);
  if (found != std::end(kPhases)) return static_cast<RolloutPhase>(found - kPhases);
  keep_fault(fault, where, "is " + shown(value) + ", allowed " + listed(kPhases));
  return RolloutPhase::loading;
}

void record_from_json(const json::object& object, Rollout& rollout, const std::string& where, std::string& fault) {
  if (const auto* from = object.if_contains("from")) rollout.from = text_in(*from, where + ".from", fault);
  if (const auto* phase = object.if_contains("phase")) rollout.phase = phase_from_json(*phase, where + ".phase", fault);
  if (const auto* step = object.if_contains("step"))
    rollout.step = integer_in(*step, 0, static_cast<std::int64_t>(rollout.steps.size()) - 1, where + ".step", fault);
  if (const auto* reason = object.if_contains("reason")) rollout.reason = text_in(*reason, where + ".reason", fault);
  if (const auto* evidence = object.if_contains("evidence")) {
    if (evidence->is_object())
      rollout.evidence = evidence->get_object();
    else
      keep_fault(fault, where + ".evidence", "is no object");
  }
}

Rollout rollout_from_json(const json::value& value, const std::string& where, std::string& fault) {
  Rollout rollout;
  only_fields(value,
              {"version", "steps", "hold_s", "min_requests", "gates", "from", "phase", "step", "reason", "evidence"},
              where, fault);
  const auto* object = value.if_object();
  if (object == nullptr) return rollout;
  if (const auto* version = object->if_contains("version"))
    rollout.version = text_in(*version, where + ".version", fault);
  else
    keep_fault(fault, where, "has no `version`: the one that is to take over");
  if (const auto* steps = object->if_contains("steps"))
    rollout.steps = steps_from_json(*steps, where + ".steps", fault);
  if (const auto* hold = object->if_contains("hold_s"))
    rollout.hold_s = integer_in(*hold, 0, kLongestHold, where + ".hold_s", fault);
  if (const auto* least = object->if_contains("min_requests"))
    rollout.min_requests = integer_in(*least, 1, kMostRequests, where + ".min_requests", fault);
  if (const auto* gates = object->if_contains("gates"))
    rollout.gates = gates_from_json(*gates, where + ".gates", fault);
  if (rollout.gates.p99 && rollout.steps.size() < 2)
    keep_fault(fault, where + ".steps",
               "begins with 100: the gate `p99` compares the two versions, so let a smaller step come first");
  record_from_json(*object, rollout, where, fault);
  return rollout;
}

// The value of `schema` is right, or what it means that it is not.
void check_schema(const json::object& object, std::string& fault) {
  const auto* schema = object.if_contains("schema");
  if (schema == nullptr)
    return keep_fault(fault, "", "has no `schema`: write \"schema\": \"" + std::string(kStateSchema) + '"');
  if (*schema != json::value(kStateSchema))
    keep_fault(fault, "schema", "is " + shown(*schema) + ", and this mctl reads `" + std::string(kStateSchema) + '`');
}

Error file_fault(std::size_t line, std::string_view what) {
  const std::string place = line > 0 ? "line " + std::to_string(line) + ": " : "";
  return {Code::usage, printable(place + std::string(what))};
}

// The line at which a text stops being JSON.
Error syntax_fault(std::string_view text, const Error& why) {
  json::stream_parser parser;
  boost::system::error_code error;
  const std::size_t read = parser.write_some(text.data(), text.size(), error);
  if (error) return file_fault(1 + std::ranges::count(text.substr(0, read), '\n'), why.text);
  if (!parser.done()) return file_fault(1 + std::ranges::count(text, '\n'), "the text ends too early: it was cut");
  if (const auto line = line_of_second_key(text); line > 0) return file_fault(line, "this key is there twice");
  return file_fault(0, why.text);
}

// --- printing ------------------------------------------------------------------------------------------------------

// On one line.
void append_short(std::string& out, const json::value& value) {
  const auto join = [&](const auto& items, char open, char close, auto item) {
    out += open;
    for (std::size_t i = 0; const auto& part : items) {
      if (i++ > 0) out += ", ";
      item(part);
    }
    out += close;
  };
  if (const auto* list = value.if_array())
    join(*list, '[', ']', [&](const json::value& item) { append_short(out, item); });
  else if (const auto* object = value.if_object())
    join(*object, '{', '}', [&](const auto& pair) {
      out += json::serialize(pair.key()) + ": ";
      append_short(out, pair.value());
    });
  else
    out += value.is_double() ? text_of_number(value.get_double()) : json::serialize(value);
}

void append_long(std::string& out, const json::value& value, std::size_t indent) {
  const std::size_t begin = out.size();
  append_short(out, value);
  const auto* object = value.if_object();
  if (object == nullptr || object->empty() || (indent > 0 && out.size() - begin <= kLineLength)) return;
  out.resize(begin);
  out += '{';
  for (bool first = true; const auto& [key, item] : *object) {
    out += std::string(first ? "\n" : ",\n") + std::string(indent + 2, ' ') + json::serialize(key) + ": ";
    append_long(out, item, indent + 2);
    first = false;
  }
  out += '\n' + std::string(indent, ' ') + '}';
}

json::object version_to_json(const VersionState& version) {
  json::object object{{"bundle", version.bundle}};
  if (!version.digest.empty()) object["digest"] = version.digest;
  if (auto settings = settings_to_json(version.settings); !settings.empty()) object["settings"] = settings;
  return object;
}

json::object gates_to_json(const Gates& gates) {
  json::object object;
  if (gates.errors) object["errors"] = *gates.errors;
  if (gates.p99) object["p99"] = *gates.p99;
  if (gates.mismatch) object["mismatch"] = *gates.mismatch;
  return object;
}

json::object rollout_to_json(const Rollout& rollout) {
  json::object object{{"version", rollout.version},
                      {"steps", json::value_from(rollout.steps)},
                      {"hold_s", rollout.hold_s},
                      {"min_requests", rollout.min_requests},
                      {"gates", gates_to_json(rollout.gates)}};
  if (!rollout.from.empty()) object["from"] = rollout.from;
  object["phase"] = name_of(rollout.phase);
  object["step"] = rollout.step;
  if (!rollout.reason.empty()) object["reason"] = rollout.reason;
  if (!rollout.evidence.empty()) object["evidence"] = rollout.evidence;
  return object;
}

// --- does it hold together? ----------------------------------------------------------------------------------------

std::string names_of(const ModelState& model) {
  std::string text;
  for (const auto& [name, version] : model.versions) text += (text.empty() ? "" : ", ") + name;
  return text.empty() ? "it has no version" : "there are " + text;
}

void check_name(const std::string& name, const std::string& where, std::string& fault) {
  if (!is_name(name)) keep_fault(fault, where, "is no name: " + std::string(kNameRule));
}

void check_labels(const ModelState& model, const std::string& where, std::string& fault) {
  for (const auto& [label, version] : model.labels) {
    const std::string at = where + ".labels." + label;
    check_name(label, at, fault);
    if (is_number(label)) keep_fault(fault, at, "is a number, which only a version may be");
    if (model.versions.contains(label)) keep_fault(fault, at, "is the name of a version too");
    if (!model.versions.contains(version))
      keep_fault(fault, at, "points to version `" + version + "`, which is not there: " + names_of(model));
  }
}

void check_named(const ModelState& model, const std::string& name, const std::string& at, std::string& fault) {
  if (version_named(model, name) == nullptr)
    keep_fault(fault, at, "names `" + name + "`, which is no label and no version: " + names_of(model));
}

void check_traffic(const ModelState& model, const std::string& where, std::string& fault) {
  std::int64_t sum = 0;
  for (const auto& [name, percent] : model.traffic) {
    check_named(model, name, where + ".traffic." + name, fault);
    sum += percent;
  }
  if (!model.traffic.empty() && sum != 100)
    keep_fault(fault, where + ".traffic", "adds up to " + std::to_string(sum) + ", not to 100");
}

void check_rollout(const ModelState& model, const std::string& where, std::string& fault) {
  const Rollout& rollout = *model.rollout;
  if (!rollout.runs()) return;  // a record, of versions that may be gone
  for (const std::string& name : {rollout.version, rollout.from})
    if (!name.empty() && !model.versions.contains(name))
      keep_fault(fault, where, "names version `" + name + "`, which is not there: " + names_of(model));
  if (rollout.from.empty() && rollout.phase != RolloutPhase::loading)
    keep_fault(fault, where, "has a `phase`, but no `from`: leave out both, and it begins");
  if (rollout.from == rollout.version)
    keep_fault(fault, where, "goes to version `" + rollout.version + "`, which has all the traffic");
}

}  // namespace

std::string_view name_of(RolloutPhase phase) { return kPhases[static_cast<std::size_t>(phase)]; }

bool VersionLess::operator()(std::string_view one, std::string_view other) const {
  const std::string_view whole_one = one, whole_other = other;
  const auto number = [](std::string_view& text) {  // takes the digits off, without leading zeros
    const auto end = std::ranges::find_if_not(text, is_digit);
    std::string_view digits = text.substr(0, static_cast<std::size_t>(end - text.begin()));
    text.remove_prefix(digits.size());
    digits.remove_prefix(std::min(digits.find_first_not_of('0'), digits.size()));
    return digits;
  };
  while (!one.empty() && !other.empty()) {
    if (is_digit(one[0]) && is_digit(other[0])) {
      const std::string_view left = number(one), right = number(other);
      if (left.size() != right.size()) return left.size() < right.size();
      if (left != right) return left < right;
    } else {
      if (is_digit(one[0]) != is_digit(other[0])) return is_digit(other[0]);
      if (one[0] != other[0]) return one[0] < other[0];
      one.remove_prefix(1);
      other.remove_prefix(1);
    }
  }
  if (one.empty() != other.empty()) return one.empty();
  return whole_one < whole_other;  // 01 and 1
}

const std::string* version_named(const ModelState& model, std::string_view name) {
  if (const auto version = model.versions.find(name); version != model.versions.end()) return &version->first;
  const auto label = model.labels.find(name);
  return label != model.labels.end() ? &label->second : nullptr;
}

const ModelState* model_named(const DesiredState& state, std::string_view name) {
  if (const auto alias = state.aliases.find(name); alias != state.aliases.end()) name = alias->second;
  const auto model = state.models.find(name);
  return model != state.models.end() ? &model->second : nullptr;
}

ModelState model_from_json(const json::value& value, const std::string& where, std::string& fault) {
  ModelState model;
  only_fields(value, {"versions", "labels", "traffic", "shadow", "rollout", "previous", "keep", "settings"}, where,
              fault);
  const auto* object = value.if_object();
  if (object == nullptr) return model;
  if (!object->contains("versions")) keep_fault(fault, where, "has no `versions`");
  each_in(*object, "versions", where, fault, [&](std::string name, const json::value& item, const std::string& at) {
    model.versions[std::move(name)] = version_from_json(item, at, fault);
  });
  each_in(*object, "labels", where, fault, [&](std::string name, const json::value& item, const std::string& at) {
    model.labels[std::move(name)] = text_in(item, at, fault);
  });
  each_in(*object, "traffic", where, fault, [&](std::string name, const json::value& item, const std::string& at) {
    model.traffic[std::move(name)] = integer_in(item, 0, 100, at, fault);
  });
  if (const auto* item = object->if_contains("shadow"))
    model.shadow = shadow_from_json(*item, where + ".shadow", fault);
  if (const auto* item = object->if_contains("rollout"))
    model.rollout = rollout_from_json(*item, where + ".rollout", fault);
  if (const auto* item = object->if_contains("previous")) model.previous = text_in(*item, where + ".previous", fault);
  if (const auto* item = object->if_contains("keep"))
    model.keep = integer_in(*item, 0, kMostKept, where + ".keep", fault);
  if (const auto* item = object->if_contains("settings"))
    model.settings = settings_from_json(*item, where + ".settings", fault);
  return model;
}

void check_model(const std::string& name, const ModelState& model, std::string& fault) {
  const std::string where = "models." + name;
  check_name(name, where, fault);
  for (const auto& [version, state] : model.versions) check_name(version, where + ".versions." + version, fault);
  check_labels(model, where, fault);
  check_traffic(model, where, fault);
  if (model.shadow) check_named(model, model.shadow->version, where + ".shadow.version", fault);
  if (model.rollout) check_rollout(model, where + ".rollout", fault);
  if (!model.previous.empty() && !model.versions.contains(model.previous))
    keep_fault(fault, where + ".previous", "is `" + model.previous + "`, which is not there: " + names_of(model));
}

std::map<std::string, std::string, std::less<>> aliases_from_json(const json::value& value, std::string& fault) {
  std::map<std::string, std::string, std::less<>> aliases;
  const auto* object = value.if_object();
  if (object == nullptr) keep_fault(fault, "aliases", "is no object");
  if (object != nullptr)
    for (const auto& [alias, model] : *object) aliases[alias] = text_in(model, "aliases." + std::string(alias), fault);
  return aliases;
}

void check_aliases(const DesiredState& state, std::string& fault) {
  for (const auto& [alias, model] : state.aliases) {
    const std::string at = "aliases." + alias;
    for (std::size_t begin = 0; begin <= alias.size();) {
      const std::size_t end = std::min(alias.find('/', begin), alias.size());
      const std::string part = alias.substr(begin, end - begin);
      check_name(part, at, fault);
      if (begin > 0 &&
          (part == "versions" || part == "infer" || part == "ready" || part == "stats" || part == "config"))
        keep_fault(fault, at, "has the part `" + part + "`, which means something else in a request's path");
      begin = end + 1;
    }
    if (alias.size() > 256) keep_fault(fault, at, "has more than 256 bytes");
    if (state.models.contains(alias)) keep_fault(fault, at, "is the name of a model too");
    if (!state.models.contains(model))
      keep_fault(fault, at, "stands for the model `" + model + "`, which is not there");
  }
}

Result<DesiredState> parse_state(std::string_view text) {
  if (text.size() > kMaxState) return file_fault(0, "a state has at most " + std::to_string(kMaxState) + " bytes");
  const auto value = parse_json(text);
  if (!value) return syntax_fault(text, value.error());
  std::string fault;
  DesiredState state;
  only_fields(*value, {"schema", "models", "aliases"}, "", fault);
  if (const auto* object = value->if_object()) {
    check_schema(*object, fault);
    each_in(*object, "models", "", fault, [&](std::string name, const json::value& item, const std::string& at) {
      state.models[std::move(name)] = model_from_json(item, at, fault);
    });
    if (const auto* aliases = object->if_contains("aliases")) state.aliases = aliases_from_json(*aliases, fault);
  }
  for (const auto& [name, model] : state.models) check_model(name, model, fault);
  check_aliases(state, fault);
  if (!fault.empty()) return file_fault(line_of_fault(text, fault), fault);
  return state;
}

json::object model_to_json(const ModelState& model) {
  json::object object;
  json::object& versions = object["versions"].emplace_object();
  for (const auto& [name, version] : model.versions) versions[name] = version_to_json(version);
  if (!model.labels.empty()) object["labels"] = json::value_from(model.labels);
  if (!model.traffic.empty()) object["traffic"] = json::value_from(model.traffic);
  if (model.shadow) object["shadow"] = {{"version", model.shadow->version}, {"percent", model.shadow->percent}};
  if (model.rollout) object["rollout"] = rollout_to_json(*model.rollout);
  if (!model.previous.empty()) object["previous"] = model.previous;
  object["keep"] = model.keep;
  if (auto settings = settings_to_json(model.settings); !settings.empty()) object["settings"] = settings;
  return object;
}

json::object state_to_json(const DesiredState& state) {
  json::object object{{"schema", kStateSchema}};
  json::object& models = object["models"].emplace_object();
  for (const auto& [name, model] : state.models) models[name] = model_to_json(model);
  if (!state.aliases.empty()) object["aliases"] = json::value_from(state.aliases);
  return object;
}

std::string print_state(const DesiredState& state) {
  std::string text;
  append_long(text, state_to_json(state), 0);
  return text + '\n';
}

std::string etag_of(std::string_view printed) {
  return '"' + sha256(std::as_bytes(std::span(printed))).substr(0, 32) + '"';
}

Status check_if_match(std::string_view header, std::string_view etag) {
  if (header.empty() || header == "*") return Done{};
  for (std::size_t begin = 0; begin <= header.size();) {
    const std::size_t end = std::min(header.find(',', begin), header.size());
    std::string_view one = header.substr(begin, end - begin);
    while (one.starts_with(' ') || one.starts_with('\t')) one.remove_prefix(1);
    while (one.ends_with(' ') || one.ends_with('\t')) one.remove_suffix(1);
    if (one == etag) return Done{};
    begin = end + 1;
  }
  return Error{Code::outdated, "the state has changed since it was read, it is now " + std::string(etag) +
                                   ": read it again and repeat the change"};
}

}  // namespace mctl
