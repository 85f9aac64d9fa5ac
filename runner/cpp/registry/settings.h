// What can be set for each model and version: the flags of `mctl serve` that belong to one model, and what only makes
// sense where there are many.
//
// A setting has the name of its flag with underscores: `--max-batch-size 16` is {"max_batch_size": 16}. Only here are
//
//   instances: 2, or {"min": 1, "max": 4}   workers; between the two, by load
//   load: "start" | "on_demand"             on_demand: registered, but in memory only while somebody asks for it
//   idle_unload_s: 300                      how long an on_demand model stays without a request
//   priority: "high" | "normal" | "background"
//
// What belongs to the server as a whole (its address, its limits, digests, the sandbox) is not here: who may change a
// model may not take the sandbox away.
#pragma once

#include <boost/json.hpp>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include "engine/settings.h"

namespace mctl {

struct InstanceRange {
  std::int64_t min = 1, max = 1;
  bool operator==(const InstanceRange&) const = default;
};

enum class LoadWhen : std::uint8_t { start, on_demand };
enum class Priority : std::uint8_t { high, normal, background };
// What one place says: a version, a model, serve.toml, the flags. Empty: not set there.
struct SettingsLayer {
  std::optional<InstanceRange> instances;
  std::optional<std::int64_t> threads;
  std::optional<std::int64_t> max_batch_size, max_request_rows;  // rows
  std::optional<std::int64_t> max_queue_delay_us;
  std::optional<std::vector<std::int64_t>> allowed_batch_sizes;  // ascending
  std::optional<std::int64_t> max_queue_size;                    // rows
  std::optional<std::int64_t> default_timeout_ms, latency_target_ms;
  std::optional<std::int64_t> percentile;
  std::optional<std::int64_t> worker_timeout, idle_unload_s;  // seconds
  std::optional<Start> start;
  std::optional<LoadWhen> load;
  std::optional<Priority> priority;

  bool operator==(const SettingsLayer&) const = default;
};

// The settings that hold: of each, what the first layer says that has it. Layers in this order: the version's, the
// model's, those of the folder's serve.toml, the flags.
SettingsLayer resolved(std::initializer_list<const SettingsLayer*> layers);

// What the engine runs a version with: `flags`, and over them what is set. Workers begin at `min`.
ModelSettings settings_with(ModelSettings flags, const SettingsLayer& set);

// A fault names the setting, what it is and what is allowed; the first one is kept in `fault`.
SettingsLayer settings_from_json(const boost::json::value& value, const std::string& where, std::string& fault);
boost::json::object settings_to_json(const SettingsLayer& settings);

}  // namespace mctl
