// What came of the requests, counted, and as JSON.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace load {

// failed: a status of its own; unreachable: no connection; lost: it ended, or the time was up, before the answer;
// abandoned: our patience was over; unsent: no connection was free before the end.
enum Outcome { right, wrong, refused, expired, failed, lost, abandoned, unreachable, unsent, outcomes };
constexpr std::array<std::string_view, outcomes> kNames = {"right", "wrong",     "refused",     "expired", "failed",
                                                           "lost",  "abandoned", "unreachable", "unsent"};

inline Outcome outcome_of(int status) {
  if (status == 429 || status == 503) return refused;
  return status == 504 ? expired : failed;
}

struct Tally {
  std::array<std::uint64_t, outcomes> counts{};
  std::map<int, std::uint64_t> statuses;
  std::vector<std::uint32_t> right_us;    // from the time at which the request was meant to leave
  std::vector<std::uint32_t> refused_us;  // from the time at which it left
  std::vector<std::uint32_t> delay_us;    // from the one to the other

  void merge(const Tally& other) {
    for (std::size_t i = 0; i < outcomes; ++i) counts[i] += other.counts[i];
    for (const auto& [status, count] : other.statuses) statuses[status] += count;
    right_us.insert(right_us.end(), other.right_us.begin(), other.right_us.end());
    refused_us.insert(refused_us.end(), other.refused_us.begin(), other.refused_us.end());
    delay_us.insert(delay_us.end(), other.delay_us.begin(), other.delay_us.end());
  }
};

inline std::string quoted(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += c < 0x20 || c > 0x7e ? '?' : c;
  }
  return out + '"';
}

inline std::string distribution(std::vector<std::uint32_t> values) {
  std::sort(values.begin(), values.end());
  double sum = 0;
  for (const auto value : values) sum += value;
  const auto at = [&](double share) {  // nearest rank
    if (values.empty()) return std::string("null");
    const double rank = std::max(std::ceil(share * static_cast<double>(values.size())), 1.0);
    return std::to_string(values[static_cast<std::size_t>(rank) - 1]);
  };
  const std::string mean = values.empty() ? "null" : std::to_string(sum / static_cast<double>(values.size()));
  return "{\"count\":" + std::to_string(values.size()) + ",\"mean\":" + mean + ",\"p50\":" + at(.5) +
         ",\"p90\":" + at(.9) + ",\"p99\":" + at(.99) + ",\"p999\":" + at(.999) + ",\"max\":" + at(1) + '}';
}

// The members of a JSON object, without its braces.
inline std::string members_of(const Tally& tally) {
  std::string out, statuses;
  for (std::size_t i = 0; i < outcomes; ++i) out += quoted(kNames[i]) + ':' + std::to_string(tally.counts[i]) + ',';
  for (const auto& [status, count] : tally.statuses) {
    statuses += (statuses.empty() ? "\"" : ",\"") + std::to_string(status) + "\":" + std::to_string(count);
  }
  return out + "\"statuses\":{" + statuses + "},\"right_us\":" + distribution(tally.right_us) +
         ",\"refused_us\":" + distribution(tally.refused_us) + ",\"delay_us\":" + distribution(tally.delay_us);
}

}  // namespace load
