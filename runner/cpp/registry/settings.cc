#include "registry/settings.h"

#include <algorithm>
#include <limits>
#include <span>
#include <string_view>
#include <variant>

#include "registry/reading.h"

namespace mctl {
namespace {

namespace json = boost::json;

constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();

template <class T>
using Member = std::optional<T> SettingsLayer::*;
using AnyMember = std::variant<Member<std::int64_t>, Member<std::vector<std::int64_t>>, Member<InstanceRange>,
                               Member<Start>, Member<LoadWhen>, Member<Priority>>;

struct Setting {
  std::string_view name;
  AnyMember member;
  std::int64_t least = 0, most = 0;  // of a number
};

// Ranges are those of the flags: a test compares the two.
constexpr Setting kSettings[] = {
    {"instances", &SettingsLayer::instances, 1, 256},
    {"threads", &SettingsLayer::threads, 1, 1024},
    {"max_batch_size", &SettingsLayer::max_batch_size, 1, kMost},
    {"max_queue_delay_us", &SettingsLayer::max_queue_delay_us, 0, kMost},
    {"allowed_batch_sizes", &SettingsLayer::allowed_batch_sizes, 1, kMost},
    {"max_queue_size", &SettingsLayer::max_queue_size, 1, kMost},
    {"default_timeout_ms", &SettingsLayer::default_timeout_ms, 1, kMost},
    {"latency_target_ms", &SettingsLayer::latency_target_ms, 1, kMost},
    {"percentile", &SettingsLayer::percentile, 50, 99},
    {"max_request_rows", &SettingsLayer::max_request_rows, 1, kMost},
    {"worker_timeout", &SettingsLayer::worker_timeout, 1, kMost},
    {"start", &SettingsLayer::start},
    {"load", &SettingsLayer::load},
    {"idle_unload_s", &SettingsLayer::idle_unload_s, 1, kMost},
    {"priority", &SettingsLayer::priority},
};

constexpr std::string_view kStarts[] = {"full", "quick"};
constexpr std::string_view kLoads[] = {"start", "on_demand"};
constexpr std::string_view kPriorities[] = {"high", "normal", "background"};

std::span<const std::string_view> words_of(Start) { return kStarts; }
std::span<const std::string_view> words_of(LoadWhen) { return kLoads; }
std::span<const std::string_view> words_of(Priority) { return kPriorities; }

// --- from JSON: one overload for each type -------------------------------------------------------------------------

void read(const Setting& setting, const json::value& value, const std::string& where, std::string& fault,
          std::int64_t& number) {
  number = integer_in(value, setting.least, setting.most, where, fault);
}

void read(const Setting& setting, const json::value& value, const std::string& where, std::string& fault,
          std::vector<std::int64_t>& numbers) {
  const auto* list = value.if_array();
  if (list == nullptr || list->empty()) return keep_fault(fault, where, "is no list of numbers");
  for (const auto& item : *list) numbers.push_back(integer_in(item, setting.least, setting.most, where, fault));
  if (std::ranges::adjacent_find(numbers, std::greater_equal()) != numbers.end())
    keep_fault(fault, where, "is not ascending: " + shown(value));
}

void read(const Setting& setting, const json::value& value, const std::string& where, std::string& fault,
          InstanceRange& range) {
  if (!value.is_object()) {
    range.min = range.max = integer_in(value, setting.least, setting.most, where, fault);
    return;
  }
  only_fields(value, {"min", "max"}, where, fault);
  const auto end = [&](std::string_view name) {
    const auto* number = value.get_object().if_contains(name);
    if (number == nullptr) return keep_fault(fault, where, "has no `" + std::string(name) + '`'), std::int64_t{1};
    return integer_in(*number, setting.least, setting.most, where + '.' + std::string(name), fault);
  };
  range = {end("min"), end("max")};
  if (range.min > range.max) keep_fault(fault, where, "has a `min` above its `max`");
}

template <class Word>
void read(const Setting&, const json::value& value, const std::string& where, std::string& fault, Word& word) {
  const auto words = words_of(word);
  const auto* text = value.if_string();
  const auto found = text != nullptr ? std::ranges::find(words, std::string_view(*text)) : words.end();
  if (found == words.end()) return keep_fault(fault, where, "is " + shown(value) + ", allowed " + listed(words));
  word = static_cast<Word>(found - words.begin());
}

// --- to JSON -------------------------------------------------------------------------------------------------------

json::value to_json(std::int64_t number) { return number; }
json::value to_json(const std::vector<std::int64_t>& numbers) { return json::value_from(numbers); }
json::value to_json(const InstanceRange& range) {
  if (range.min == range.max) return range.min;
  return {{"min", range.min}, {"max", range.max}};
}
template <class Word>
json::value to_json(Word word) {
  return json::value(words_of(word)[static_cast<std::size_t>(word)]);
}

std::string unknown(std::string_view key) {
  std::string name(key);
  std::ranges::replace(name, '-', '_');
  if (std::ranges::find(kSettings, name, &Setting::name) != std::end(kSettings))
    return "is no setting: write `" + name + '`';
  std::vector<std::string_view> names;
  for (const Setting& setting : kSettings) names.push_back(setting.name);
  return "is no setting of a model: allowed are " + listed(names);
}

}  // namespace

SettingsLayer resolved(std::initializer_list<const SettingsLayer*> layers) {
  SettingsLayer all;
  for (const SettingsLayer* layer : layers)
    for (const Setting& setting : kSettings)
      std::visit(
          [&](auto member) {
            if (!(all.*member)) all.*member = layer->*member;
          },
          setting.member);
  return all;
}

ModelSettings settings_with(ModelSettings flags, const SettingsLayer& set) {
  const auto over = [](auto& flag, const auto& setting) {
    if (setting) flag = *setting;
  };
  if (set.instances) flags.instances = set.instances->min;
  over(flags.threads, set.threads);
  over(flags.max_batch_size, set.max_batch_size);
  over(flags.max_queue_delay_us, set.max_queue_delay_us);
  over(flags.allowed_batch_sizes, set.allowed_batch_sizes);
  over(flags.max_queue_size, set.max_queue_size);
  over(flags.default_timeout_ms, set.default_timeout_ms);
  over(flags.latency_target_ms, set.latency_target_ms);
  over(flags.percentile, set.percentile);
  over(flags.max_request_rows, set.max_request_rows);
  over(flags.worker_timeout, set.worker_timeout);
  if (set.load == LoadWhen::on_demand) flags.start = Start::quick;  // somebody waits
  over(flags.start, set.start);
  return flags;
}

SettingsLayer settings_from_json(const json::value& value, const std::string& where, std::string& fault) {
  SettingsLayer settings;
  const auto* object = value.if_object();
  if (object == nullptr) return keep_fault(fault, where, "is no object"), settings;
  for (const auto& field : *object) {
    const std::string_view key = field.key();
    const std::string at = where + '.' + std::string(key);
    const auto* setting = std::ranges::find(kSettings, key, &Setting::name);
    if (setting == std::end(kSettings)) {
      keep_fault(fault, at, unknown(key));
      continue;
    }
    std::visit([&](auto member) { read(*setting, field.value(), at, fault, (settings.*member).emplace()); },
               setting->member);
  }
  return settings;
}

json::object settings_to_json(const SettingsLayer& settings) {
  json::object object;
  for (const Setting& setting : kSettings)
    std::visit(
        [&](auto member) {
          if (settings.*member) object[setting.name] = to_json(*(settings.*member));
        },
        setting.member);
  return object;
}

}  // namespace mctl
