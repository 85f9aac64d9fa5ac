#include "doors/access_log.h"

#include <array>
#include <ctime>

#include "format/text.h"

namespace mctl {
namespace {

constexpr std::size_t kMostTarget = 256;  // characters of a target that are logged

// RFC 3339, in UTC, with milliseconds.
std::string time_text() {
  timespec now{};
  std::tm parts{};
  char text[32], whole[40];
  clock_gettime(CLOCK_REALTIME, &now);
  gmtime_r(&now.tv_sec, &parts);
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%S", &parts);
  std::snprintf(whole, sizeof whole, "%s.%03dZ", text, static_cast<int>(now.tv_nsec / 1'000'000));
  return whole;
}

std::string_view name_of(Verb verb) {
  constexpr std::array<std::string_view, kVerbs> names{"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OTHER"};
  static_assert(!names.back().empty());
  return names[static_cast<std::size_t>(verb)];
}

void append_text(std::string& out, std::string_view name, std::string_view text) {
  ((out += ",\"") += name) += "\":";
  append_json_string(out, text);
}

void append_number(std::string& out, std::string_view name, std::int64_t number) {
  (((out += ",\"") += name) += "\":") += std::to_string(number);
}

}  // namespace

std::string line_of(const Access& access) {
  const Head& head = access.connection.head();
  std::string line = "{\"time\":\"" + time_text() + '"';
  append_text(line, "client", access.connection.address());
  append_text(line, "verb", name_of(head.verb));
  append_text(line, "path", std::string_view(head.target).substr(0, kMostTarget));
  if (!access.id.empty()) append_text(line, "id", access.id);
  append_number(line, "status", access.status);
  if (const Call* call = access.call) {
    if (!call->inputs.empty()) append_number(line, "rows", call->rows);
    if (call->batch_rows > 0) {
      append_number(line, "batch", call->batch_rows);
      append_text(line, "bucket", call->bucket);
    }
    append_number(line, "queue_us", call->queue_ns / 1000);
    append_number(line, "compute_us", call->compute_ns / 1000);
  }
  append_number(line, "total_us", access.total_ns / 1000);
  return line + '}';
}

}  // namespace mctl
