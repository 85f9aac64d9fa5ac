// One request as a line of JSON, for `--log-requests`.
#pragma once

#include <cstdint>
#include <string>

#include "doors/connection.h"
#include "engine/call.h"

namespace mctl {

struct Access {
  const Connection& connection;
  std::string_view id;  // empty: none
  unsigned status = 0;
  std::int64_t total_ns = 0;   // from the last byte of the request to its answer
  const Call* call = nullptr;  // of an inference
};

constexpr unsigned kClientWentAway = 499;  // the status in the log, as nginx has it: no answer was sent

std::string line_of(const Access& access);

}  // namespace mctl
