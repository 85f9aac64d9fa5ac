// mctl-runner: one binary, three roles. `serve` is for people, `worker` is how a pool starts its processes,
// `measure` is how `mctl bench` does.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <new>
#include <string>
#include <string_view>
#include <vector>

#include "model/measure.h"
#include "options.h"
#include "pool/process_pool.h"
#include "pool/worker.h"
#include "serve.h"

namespace {

constexpr int kRefused = 1, kUsage = 2, kBug = 3;

void say(const std::string& line) { std::fprintf(stderr, "%s\n", line.c_str()); }

int fail(const mctl::Error& error) {
  say("error: " + error.text);
  if (error.code == mctl::Code::usage) say("hint: `mctl-runner --help` lists the options");
  if (error.code == mctl::Code::usage) return kUsage;
  return error.code == mctl::Code::internal ? kBug : kRefused;
}

int serve(const std::vector<std::string>& words) {
  const auto options = mctl::parse_serve_options(words);
  if (!options) return fail(options.error());
  const auto done = mctl::serve(*options, say);
  return done ? *done : fail(done.error());
}

// Out of memory, the kernel ends a worker before the front: its score is the front's and a tenth of the machine's
// memory. (Once this process's memory is hidden, the file is root's.)
void prefer_to_the_front() {
  constexpr auto file = "/proc/self/oom_score_adj";
  int score = 0;
  std::ifstream(file) >> score;
  std::ofstream(file) << std::min(score + 100, 1000);
}

// LIBTORCH THREADS MAX_ROWS [--no-verify] [--no-sandbox] [--strict] [--debuggable] [--replaces] [--quick], where 0 rows
// are the contract's. Descriptors have the numbers that the pool gave them.
int work(const std::vector<std::string>& words) {
  if (words.size() < 3) return fail({mctl::Code::usage, "`worker` is started by `serve`"});
  mctl::WorkerOptions options;
  options.bundle_fd = mctl::kBundleFd;
  options.arena_fd = mctl::kArenaFd;
  options.wake_fd = mctl::kWakeFd;
  options.done_fd = mctl::kDoneFd;
  options.libtorch = words[0];
  options.threads = std::atoi(words[1].c_str());
  if (const std::int64_t rows = std::atoll(words[2].c_str()); rows > 0) options.max_rows = rows;
  const auto given = [&](std::string_view flag) { return std::find(words.begin(), words.end(), flag) != words.end(); };
  options.verify = !given("--no-verify");
  options.sandbox = !given("--no-sandbox");
  options.strict = given("--strict");
  options.debuggable = given("--debuggable");
  options.replaces = given("--replaces");
  options.quick = given("--quick");
  prefer_to_the_front();
  return mctl::run_worker(options);
}

int measure(const std::vector<std::string>& words) {
  if (words.size() != 3) return fail({mctl::Code::usage, "`measure` is started by `mctl bench`"});
  return mctl::run_measure({words[0], words[1], std::atoi(words[2].c_str())});
}

int run(const std::string& role, const std::vector<std::string>& words) {
  if (role == "--version") return std::puts("mctl-runner " MCTL_VERSION) < 0;
  if (role == "serve" && (words.empty() || (words[0] != "--help" && words[0] != "-h"))) return serve(words);
  if (role == "worker") return work(words);
  if (role == "measure") return measure(words);
  if (role == "serve" || role == "--help" || role == "-h") return std::puts(mctl::serve_help().c_str()) < 0;
  return fail({mctl::Code::usage, "no such role: `" + role + "`"});
}

}  // namespace

int main(int count, char** arguments) {
  const std::vector<std::string> words(arguments + 1, arguments + count);
  try {
    if (words.empty()) return fail({mctl::Code::usage, "nothing to do"});
    return run(words[0], {words.begin() + 1, words.end()});
  } catch (const std::bad_alloc&) {
    return fail({mctl::Code::host, "there is not enough memory"});
  } catch (const std::exception& error) {
    say(std::string("error: bug in mctl-runner: ") + error.what());
    return kBug;
  }
}
