// What is counted, as Prometheus text (GET /metrics) and as Triton's statistics (GET …/stats).
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "engine/metrics.h"
#include "format/manifest.h"

namespace mctl {

// One version of a model, with its numbers.
struct Counted {
  std::string_view name, version;
  const Manifest& manifest;
  const Metrics& metrics;
  Gauges gauges = {};
  const HandlerMetrics* handler = nullptr;  // of a model that has one
  HandlerGauges handler_gauges = {};
};

// Each family once, with the samples of every model, then the process's own.
std::string prometheus(std::span<const Counted> models);
std::string statistics(std::span<const Counted> models);

}  // namespace mctl
