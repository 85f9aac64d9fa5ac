#include "pool/process_pool.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <boost/asio/post.hpp>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "pool/ends.h"
#include "pool/model_areas.h"

namespace mctl {
namespace {

using namespace std::chrono_literals;
namespace asio = boost::asio;
using boost::system::error_code;

constexpr std::chrono::hours kUnknown(24);

std::string_view name_of(Phase phase) {
  constexpr std::string_view names[] = {"starting", "verify", "load", "warmup", "golden", "ready", "failed"};
  return names[static_cast<std::size_t>(phase)];
}

// Asio opens its sockets without close-on-exec.
void close_from(int first) {
  if (syscall(SYS_close_range, first, ~0U, 0) == 0) return;
  const long end = sysconf(_SC_OPEN_MAX);
  for (int fd = first; fd < end; ++fd) close(fd);
}

// What a new worker needs to know between fork and exec, where little is allowed: no memory may be taken.
struct Launch {
  std::array<int, 4> fds;
  char* const* arguments;
  pid_t front;
  WorkerState& state;  // tells the front what went wrong
};

[[noreturn]] void fail_launch(WorkerState& state, const char* what) {
  std::snprintf(state.error, sizeof state.error, "cannot start a worker: %s: %s", what, std::strerror(errno));
  state.code = static_cast<std::uint32_t>(Code::host);
  state.phase.store(Phase::failed, std::memory_order_release);
  _exit(1);
}

// A worker ends with the front, whatever way that goes, and not by signals that a terminal or a service manager sends
// to all processes at once: the front drains first.
[[noreturn]] void become_worker(Launch launch) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != launch.front) _exit(1);
  signal(SIGINT, SIG_IGN);
  signal(SIGTERM, SIG_IGN);
  signal(SIGPIPE, SIG_DFL);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  for (int& fd : launch.fds) {
    fd = fcntl(fd, F_DUPFD, kDoneFd + 1);
    if (fd < 0) fail_launch(launch.state, "descriptors");
  }
  for (int i = 0; i < 4; ++i) {
    if (dup2(launch.fds[i], kBundleFd + i) < 0) fail_launch(launch.state, "descriptors");
  }
  close_from(kDoneFd + 1);
  execv("/proc/self/exe", launch.arguments);
  fail_launch(launch.state, "/proc/self/exe");
}

// Whether warming up runs the largest sizes: a dim without buckets is at its smallest then.
bool warms_all(const Manifest& manifest) {
  return std::ranges::all_of(manifest.contract.dims,
                             [&](const Dim& dim) { return dim.min == dim.max || manifest.buckets.contains(dim.name); });
}

}  // namespace

ProcessPool::ProcessPool(asio::io_context& io, Reaper& reaper, const Manifest& manifest, WorkerSettings settings)
    : io_(io),
      reaper_(reaper),
      manifest_(manifest),
      settings_(std::move(settings)),
      watch_(settings_.bundle_fd, manifest),
      workers_(settings_.instances) {
  if (settings_.quick || !warms_all(manifest)) patience_ = kUnknown;
}

ProcessPool::~ProcessPool() {
  for (Worker& worker : workers_) {
    if (worker.pid > 0) reaper_.kill(worker.pid);
    forget(worker);
  }
}

Status ProcessPool::start(Events events) {
  events_ = std::move(events);
  for (std::size_t i = 0; i < workers_.size(); ++i) {
    if (auto started = spawn(i); !started) return started.error();
  }
  return Done{};
}

Status ProcessPool::spawn(std::size_t index) {
  Worker& worker = workers_[index];
  const auto areas = model_areas(manifest_.contract, settings_.max_rows);
  if (!areas) return areas.error();
  auto arena = Arena::create(*areas);
  if (!arena) return arena.error();
  if (!arena->folder().empty()) note("note: memfd is forbidden here, batches go through `" + arena->folder() + "`");
  worker.arena.emplace(*std::move(arena));
  worker.wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);  // a worker that fills it up must not stop the front
  const int done_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  const std::string threads = std::to_string(settings_.threads);
  const std::string max_rows = std::to_string(settings_.max_rows.value_or(0));
  std::vector<std::string> words = {"mctl-runner", "worker", settings_.libtorch, threads, max_rows};
  if (!settings_.verify) words.push_back("--no-verify");
  if (!settings_.sandbox) words.push_back("--no-sandbox");
  if (settings_.strict) words.push_back("--strict");
  if (settings_.debuggable) words.push_back("--debuggable");
  if (was_ready_) words.push_back("--replaces");
  if (settings_.quick) words.push_back("--quick");
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  const Launch launch{{settings_.bundle_fd, worker.arena->fd(), worker.wake_fd, done_fd},
                      arguments.data(),
                      getpid(),
                      worker.arena->worker()};
  if (worker.wake_fd >= 0 && done_fd >= 0) worker.pid = fork();
  if (worker.pid == 0) become_worker(launch);
  if (worker.pid < 0) {
    const std::string way_out = errno == EAGAIN ? "; raise the limit of processes (`ulimit -u`)" : "";
    const Error error{Code::host, std::string("cannot start a worker: ") + std::strerror(errno) + way_out};
    if (done_fd >= 0) ::close(done_fd);
    forget(worker);
    return error;
  }
  reaper_.watch(worker.pid, guard_([this, index](int status, double cpu_seconds) {
                  events_.ended(cpu_seconds);
                  on_death(index, status);
                }));
  worker.phase = Phase::starting;
  worker.bell = std::make_unique<asio::posix::stream_descriptor>(io_, done_fd);
  listen(index);
  return Done{};
}

void ProcessPool::listen(std::size_t index) {
  workers_[index].bell->async_wait(asio::posix::stream_descriptor::wait_read, guard_([this, index](error_code ec) {
                                     if (!ec) on_bell(index);
                                   }));
}

void ProcessPool::on_bell(std::size_t index) {
  Worker& worker = workers_[index];
  std::uint64_t rings;
  const bool rang = read(worker.bell->native_handle(), &rings, sizeof rings) > 0;
  if (rang) worker.live ? events_.rang(index) : on_phase(index);
  if (worker.bell) listen(index);
}

void ProcessPool::on_phase(std::size_t index) {
  Worker& worker = workers_[index];
  const WorkerReport report = worker.arena->report();
  worker.phase = report.phase;
  if (worker.phase == Phase::failed) note_failure(report.error);
  if (worker.phase != Phase::ready) return;
  worker.live = true;
  worker.backoff.ready();
  for (std::size_t from = 0, to; from < report.note.size(); from = to + 1) {
    to = std::min(report.note.find('\n', from), report.note.size());
    note(report.note.substr(from, to - from));
  }
  if (was_ready_) events_.noted("note: a worker is ready again");
  events_.loaded(report.seconds);
  patience_ = std::max(patience_, std::chrono::nanoseconds(static_cast<std::int64_t>(2e9 * report.seconds[2])));
  was_ready_ = was_ready_ || std::all_of(workers_.begin(), workers_.end(), [](const Worker& w) { return w.live; });
  events_.changed();
}

void ProcessPool::note_failure(const Error& error) {
  last_error_ = error.text;
  if (!was_ready_) events_.hopeless(error);
}

// Once, not for each worker.
void ProcessPool::note(const std::string& text) {
  if (!text.empty() && notes_.insert(text).second) events_.noted(text);
}

void ProcessPool::ring(std::size_t worker) {
  const std::uint64_t one = 1;
  if (write(workers_[worker].wake_fd, &one, sizeof one) < 0 && errno != EAGAIN) kill(worker, "crash");
}

void ProcessPool::proved(std::size_t worker) { workers_[worker].backoff.reset(); }

void ProcessPool::kill(std::size_t index, const std::string& reason) {
  Worker& worker = workers_[index];
  if (worker.pid <= 0) return;
  worker.reason = reason;
  ::kill(worker.pid, SIGKILL);
}

const Error* ProcessPool::spoiled() {
  const Error* why = watch_.spoiled();
  if (why != nullptr && !given_up_) {
    given_up_ = true;
    last_error_ = why->text;
    boost::asio::post(io_, guard_([this, why] { give_up(*why); }));
  }
  return why;
}

void ProcessPool::give_up(const Error& why) {
  for (std::size_t i = 0; i < workers_.size(); ++i) {
    workers_[i].restart.reset();
    kill(i, "bundle");
  }
  events_.noted("error: " + why.text);
  if (!was_ready_) return events_.hopeless(why);
  events_.changed();
}

// --- death

void ProcessPool::on_death(std::size_t index, int status) {
  Worker& worker = workers_[index];
  const bool was_live = worker.live;
  if (const WorkerReport report = worker.arena->report(); !was_live && report.phase == Phase::failed) {
    if (worker.phase != Phase::failed) note_failure(report.error);
    worker.phase = report.phase;
  }
  if (worker.phase != Phase::failed && !given_up_) {
    last_error_ = worker.reason == "stuck" ? "a worker was stuck" : "a worker ended by " + text_of_end(status);
    if (!was_live) last_error_ += " in phase " + std::string(name_of(worker.phase));
    if (!was_ready_) return events_.hopeless({Code::host, last_error_});
  }
  if (!was_ready_) return;
  worker.live = false;
  if (!was_live) worker.backoff.failed();
  events_.replaced(!worker.reason.empty() ? worker.reason : was_live ? "crash" : "load");
  if (was_live) events_.died(index);
  forget(worker);
  if (spoiled() != nullptr) return;
  restart_later(index);
  events_.changed();
}

void ProcessPool::restart_later(std::size_t index) {
  Worker& worker = workers_[index];
  const auto pause = worker.backoff.next();
  events_.noted("warning: " + last_error_ + ", another one starts in " + std::to_string(pause.count()) + " ms");
  worker.restart = std::make_unique<asio::steady_timer>(io_, pause);
  worker.restart->async_wait(guard_([this, index](error_code ec) {
    if (ec) return;
    if (auto started = spawn(index); !started) {
      last_error_ = started.error().text;
      workers_[index].backoff.failed();
      restart_later(index);
      events_.changed();
    }
  }));
}

void ProcessPool::forget(Worker& worker) {
  worker.pid = -1;
  worker.live = false;
  worker.reason.clear();
  // The other end is the same file, and open until the process has ended: closed alone, it would go on waking this one.
  if (worker.bell) ::close(worker.bell->release());
  worker.bell.reset();
  worker.arena.reset();
  if (worker.wake_fd >= 0) ::close(worker.wake_fd);
  worker.wake_fd = -1;
}

// --- what is going on

bool ProcessPool::ready() const {
  return was_ready_ && !given_up_ &&
         std::any_of(workers_.begin(), workers_.end(), [](const Worker& w) { return w.live; });
}

std::optional<Error> ProcessPool::away() const {
  const bool some =
      std::any_of(workers_.begin(), workers_.end(), [](const Worker& w) { return w.live || w.backoff.hopeful(); });
  if (was_ready_ && !given_up_ && some) return std::nullopt;
  return Error{Code::unavailable, why_not()};
}

std::string ProcessPool::why_not() const {
  if (given_up_) return last_error_;
  if (was_ready_) return "no live worker: " + last_error_ + ", a new one is on its way";
  const auto slowest = std::min_element(workers_.begin(), workers_.end(),
                                        [](const Worker& a, const Worker& b) { return a.phase < b.phase; });
  return "loading: " + std::string(slowest == workers_.end() ? "starting" : name_of(slowest->phase));
}

std::vector<pid_t> ProcessPool::pids() const {
  std::vector<pid_t> pids;
  for (const Worker& worker : workers_) {
    if (worker.pid > 0) pids.push_back(worker.pid);
  }
  return pids;
}

}  // namespace mctl
