// What a run sends, and when: from the command line, from files and from a seed.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace load {

constexpr std::size_t kMostRequests = 10'000'000, kMostConnections = 20'000;
constexpr double kMostSeconds = 3600;

struct Case {
  std::string request;   // head and body
  std::string expected;  // the bytes of the outputs; empty: any 200 will do
};

struct Phase {
  double rate = 0, seconds = 0;  // rate 0: the times were given
};

struct Arrival {
  double seconds;  // after the start
  std::uint32_t phase, which;
};

struct Options {
  std::uint16_t port = 0;
  std::vector<Case> cases;
  std::vector<Phase> phases;
  std::vector<double> times;
  std::uint64_t seed = 0;
  std::size_t connections = 64;
  double grace = 5, patience = 0, rtol = 0, atol = 0;
  bool only_arrivals = false;
};

[[noreturn]] inline void usage(const std::string& text) { throw std::invalid_argument(text); }

inline double number(std::string_view text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool whole = error == std::errc{} && end == text.data() + text.size();
  if (!whole || !(value >= 0) || std::isinf(value)) usage("not a number: " + std::string(text));
  return value;
}

inline std::string contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) usage("cannot read " + path);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline std::vector<Phase> phases_from(std::string_view text) {
  std::vector<Phase> phases;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    const std::string_view part = text.substr(begin, end - begin);
    const std::size_t colon = part.find(':');
    if (colon == std::string_view::npos) usage("--rate wants RATE:SECONDS,…");
    phases.push_back({number(part.substr(0, colon)), number(part.substr(colon + 1))});
    begin = end + 1;
  }
  return phases;
}

inline std::vector<Case> cases_from(const std::string& folder) {
  std::vector<Case> cases;
  for (int i = 0;; ++i) {
    const std::string path = folder + '/' + std::to_string(i);
    if (access((path + ".request").c_str(), R_OK) != 0) break;
    cases.push_back({contents(path + ".request"), contents(path + ".expected")});
  }
  if (cases.empty()) usage("no case in " + folder);
  return cases;
}

inline std::vector<double> times_from(const std::string& path) {
  std::ifstream file(path);
  std::vector<double> times{std::istream_iterator<double>(file), {}};
  if (times.empty() || !file.eof()) usage("no list of seconds: " + path);
  if (!std::is_sorted(times.begin(), times.end()) || times.front() < 0) usage("the times do not ascend from 0");
  return times;
}

inline void set(Options& options, std::string_view name, const std::string& value) {
  if (name == "--port") {
    options.port = static_cast<std::uint16_t>(std::min(number(value), 65535.0));
  } else if (name == "--cases") {
    options.cases = cases_from(value);
  } else if (name == "--rate") {
    options.phases = phases_from(value);
  } else if (name == "--arrivals") {
    options.times = times_from(value);
  } else if (name == "--seed") {
    options.seed = static_cast<std::uint64_t>(number(value));
  } else if (name == "--connections") {
    options.connections = static_cast<std::size_t>(number(value));
  } else if (name == "--grace") {
    options.grace = number(value);
  } else if (name == "--patience") {
    options.patience = number(value);
  } else if (name == "--rtol") {
    options.rtol = number(value);
  } else if (name == "--atol") {
    options.atol = number(value);
  } else {
    usage("unknown option " + std::string(name));
  }
}

inline Options options_from(std::span<char*> words) {
  Options options;
  for (std::size_t i = 0; i < words.size(); ++i) {
    if (std::string_view(words[i]) == "--only-arrivals") {
      options.only_arrivals = true;
      continue;
    }
    if (i + 1 == words.size()) usage(std::string(words[i]) + " wants a value");
    set(options, words[i], words[i + 1]);
    ++i;
  }
  if (options.phases.empty() == options.times.empty()) usage("give either --rate or --arrivals");
  if (!options.only_arrivals && (options.port == 0 || options.cases.empty())) usage("--port and --cases are needed");
  if (options.connections == 0 || options.connections > kMostConnections) usage("--connections is out of range");
  return options;
}

// Poisson arrivals: gaps are exponential, drawn by inversion, so that a seed gives the same times everywhere.
inline std::vector<Arrival> arrivals_from(Options& options) {
  std::mt19937_64 random(options.seed);
  std::vector<Arrival> arrivals;
  const auto add = [&](double at, std::size_t phase) {
    if (arrivals.size() == kMostRequests) usage("more than " + std::to_string(kMostRequests) + " requests");
    const auto which = options.cases.empty() ? 0 : random() % options.cases.size();
    arrivals.push_back({at, static_cast<std::uint32_t>(phase), static_cast<std::uint32_t>(which)});
  };
  double end = 0;
  for (std::size_t phase = 0; phase < options.phases.size(); ++phase) {
    const double rate = options.phases[phase].rate, start = end;
    if ((end += options.phases[phase].seconds) > kMostSeconds) usage("longer than an hour");
    const auto gap = [&] { return -std::log1p(-static_cast<double>(random() >> 11) * 0x1p-53) / rate; };
    for (double at = start + gap(); at < end; at += gap()) add(at, phase);
  }
  for (const double at : options.times) add(at, 0);
  if (options.phases.empty()) options.phases = {{0, options.times.back()}};
  if (options.phases.front().seconds > kMostSeconds) usage("longer than an hour");
  if (arrivals.empty()) usage("no request in that time");
  return arrivals;
}

}  // namespace load
