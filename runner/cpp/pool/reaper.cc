#include "pool/reaper.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <utility>
#include <vector>

namespace mctl {
namespace {

double seconds(const timeval& time) { return static_cast<double>(time.tv_sec) + 1e-6 * time.tv_usec; }

}  // namespace

Reaper::Reaper(boost::asio::io_context& io) : signal_(io) {
  boost::system::error_code ignored;  // of a signal that exists
  signal_.add(SIGCHLD, ignored);
  wait();
}

Reaper::~Reaper() {
  for (const auto& [pid, ended] : children_) {
    ::kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
  }
}

void Reaper::watch(pid_t pid, Ended ended) { children_[pid] = std::move(ended); }

void Reaper::kill(pid_t pid) {
  ::kill(pid, SIGKILL);
  children_[pid] = [](int, double) {};
}

void Reaper::wait() {
  signal_.async_wait([this](boost::system::error_code ec, int) {
    if (ec) return;
    reap();
    wait();
  });
}

// One signal may stand for several ends, and one of a child that is traced for a stop. What is told of them may start
// and forget children.
void Reaper::reap() {
  std::vector<pid_t> pids;
  for (const auto& [pid, ended] : children_) pids.push_back(pid);
  for (const pid_t pid : pids) {
    int status = 0;
    rusage use{};
    if (wait4(pid, &status, WNOHANG, &use) != pid || WIFSTOPPED(status)) continue;
    const auto ended = children_.extract(pid);
    if (ended) ended.mapped()(status, seconds(use.ru_utime) + seconds(use.ru_stime));
  }
}

}  // namespace mctl
