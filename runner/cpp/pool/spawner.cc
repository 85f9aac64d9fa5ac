#include "pool/spawner.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

namespace mctl {
namespace {

namespace asio = boost::asio;

constexpr std::size_t kMostWords = 64 << 10;  // bytes
constexpr int kCannotRun = 127;               // as a shell says it

enum class Order : std::uint32_t { start, signal };
struct OrderHead {  // of a start its words follow, each with a zero behind it
  Order order;
  Spawner::Id id;
  std::int32_t number;  // of a signal
};

enum class News : std::uint32_t { started, ended };
struct Report {
  News news;
  Spawner::Id id;
  std::int32_t pid, status;
  double cpu_seconds;
};

// --- in the spawner

class Children {
 public:
  explicit Children(int control) : control_(control) {}

  bool obey();  // one order; false: there is nobody to give any
  void reap();
  void kill_all();

 private:
  void start(Spawner::Id id, std::vector<char*> words, const std::array<int, 2>& descriptors);
  void report(const Report& report) const;

  const int control_;
  std::map<pid_t, Spawner::Id> ids_;
};

// The words of a message; they end with the null pointer that exec wants.
std::vector<char*> words_of(char* begin, char* end) {
  std::vector<char*> words;
  while (begin < end) {
    words.push_back(begin);
    begin = std::find(begin, end, '\0') + 1;
  }
  words.push_back(nullptr);
  return words;
}

std::array<int, 2> descriptors_of(msghdr& message) {
  std::array<int, 2> descriptors = {-1, -1};
  const cmsghdr* control = CMSG_FIRSTHDR(&message);
  if (control != nullptr && control->cmsg_type == SCM_RIGHTS && control->cmsg_len == CMSG_LEN(sizeof descriptors)) {
    std::memcpy(descriptors.data(), CMSG_DATA(control), sizeof descriptors);
  }
  return descriptors;
}

// Out of memory, the kernel ends a handler before the front and the model's workers.
void prefer_to_the_front() {
  const int file = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
  if (file < 0) return;
  constexpr std::string_view score = "500";
  [[maybe_unused]] const auto written = write(file, score.data(), score.size());
  close(file);
}

// It ends with the spawner, and not by signals that a terminal or a service manager sends to all processes at once:
// the front drains first.
[[noreturn]] void become_handler(std::vector<char*>& words, const std::array<int, 2>& descriptors, pid_t spawner) {
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != spawner) _exit(1);
  for (const int number : {SIGHUP, SIGQUIT, SIGPIPE, SIGXFSZ, SIGCHLD}) ::signal(number, SIG_DFL);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  prefer_to_the_front();
  const int nothing = open("/dev/null", O_RDONLY);
  const int channel = fcntl(descriptors[0], F_DUPFD, kHandlerFd + 1);
  const int log = fcntl(descriptors[1], F_DUPFD, kHandlerFd + 1);
  if (nothing >= 0) dup2(nothing, 0);
  dup2(log, 1);
  dup2(log, 2);
  if (dup2(channel, kHandlerFd) < 0) _exit(kCannotRun);
  const unsigned first = kHandlerFd + 1;
  if (syscall(SYS_close_range, first, ~0U, 0) != 0) {
    const long end = sysconf(_SC_OPEN_MAX);
    for (int fd = kHandlerFd + 1; fd < end; ++fd) close(fd);
  }
  execvp(words[0], words.data());
  std::fprintf(stderr, "cannot run `%s`: %s\n", words[0], std::strerror(errno));
  std::fflush(stderr);
  _exit(kCannotRun);
}

void Children::report(const Report& report) const {
  while (::send(control_, &report, sizeof report, MSG_NOSIGNAL) < 0 && errno == EINTR) continue;
}

bool Children::obey() {
  std::array<char, sizeof(OrderHead) + kMostWords> bytes;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(2 * sizeof(int))> rights{};
  iovec place{bytes.data(), bytes.size()};
  msghdr message{};
  message.msg_iov = &place;
  message.msg_iovlen = 1;
  message.msg_control = rights.data();
  message.msg_controllen = rights.size();
  const ssize_t size = recvmsg(control_, &message, MSG_CMSG_CLOEXEC);
  if (size < 0) return errno == EINTR || errno == EAGAIN;
  OrderHead head;
  if (size < static_cast<ssize_t>(sizeof head)) return false;
  std::memcpy(&head, bytes.data(), sizeof head);
  if (head.order == Order::start) {
    const auto descriptors = descriptors_of(message);
    start(head.id, words_of(bytes.data() + sizeof head, bytes.data() + size), descriptors);
    for (const int descriptor : descriptors) close(descriptor);
    return true;
  }
  const auto found = std::ranges::find(ids_, head.id, [](const auto& child) { return child.second; });
  if (found == ids_.end()) return true;
  ::kill(head.number == SIGKILL ? -found->first : found->first, head.number);
  return true;
}

void Children::start(Spawner::Id id, std::vector<char*> words, const std::array<int, 2>& descriptors) {
  const pid_t spawner = getpid(), pid = fork();
  if (pid == 0) become_handler(words, descriptors, spawner);
  if (pid < 0) {
    dprintf(descriptors[1], "cannot start a process: %s\n", std::strerror(errno));
    return report({News::ended, id, -1, kCannotRun << 8, 0});
  }
  setpgid(pid, pid);  // it does so itself too: nobody may see it without
  ids_[pid] = id;
  report({News::started, id, pid, 0, 0});
}

double seconds(const timeval& time) { return static_cast<double>(time.tv_sec) + 1e-6 * time.tv_usec; }

// Also of those that a handler left behind.
void Children::reap() {
  siginfo_t ended{};
  while (waitid(P_ALL, 0, &ended, WEXITED | WNOHANG | WNOWAIT) == 0 && ended.si_pid != 0) {
    const pid_t pid = ended.si_pid;
    const auto child = ids_.extract(pid);
    if (child) ::kill(-pid, SIGKILL);  // before its number may be another's
    int status = 0;
    rusage use{};
    wait4(pid, &status, 0, &use);
    if (child) report({News::ended, child.mapped(), pid, status, seconds(use.ru_utime) + seconds(use.ru_stime)});
    ended.si_pid = 0;
  }
}

void Children::kill_all() {
  for (const auto& [pid, id] : ids_) ::kill(-pid, SIGKILL);
}

[[noreturn]] void run_spawner(int control) {
  prctl(PR_SET_NAME, "mctl-spawner");
  prctl(PR_SET_CHILD_SUBREAPER, 1);
  for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGQUIT}) ::signal(number, SIG_IGN);
  setenv("MCTL_HANDLER_FD", std::to_string(kHandlerFd).c_str(), 1);
  setenv("PYTHONUNBUFFERED", "1", 0);
  sigset_t ends;
  sigemptyset(&ends);
  sigaddset(&ends, SIGCHLD);
  sigprocmask(SIG_BLOCK, &ends, nullptr);
  std::array<pollfd, 2> sources = {
      {{control, POLLIN, 0}, {signalfd(-1, &ends, SFD_CLOEXEC | SFD_NONBLOCK), POLLIN, 0}}};
  Children children(control);
  for (bool goes_on = true; goes_on;) {
    if (poll(sources.data(), sources.size(), -1) < 0) continue;
    signalfd_siginfo told;
    while (read(sources[1].fd, &told, sizeof told) > 0) continue;
    children.reap();
    if (sources[0].revents != 0) goes_on = children.obey();
  }
  children.kill_all();
  _exit(0);
}

}  // namespace

Result<SpawnerProcess> fork_spawner() {
  std::array<int, 2> ends;
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends.data()) != 0) {
    return Error{Code::host, std::string("cannot start handlers: ") + std::strerror(errno)};
  }
  SpawnerProcess process;
  process.control = Descriptor(ends[0]);
  process.pid = fork();
  if (process.pid == 0) {
    close(ends[0]);
    run_spawner(ends[1]);
  }
  const int why = errno;
  close(ends[1]);
  if (process.pid < 0) return Error{Code::host, std::string("cannot start handlers: ") + std::strerror(why)};
  return process;
}

// --- in the front

Spawner::Spawner(asio::io_context& io, SpawnerProcess process)
    : pid_(process.pid), control_(io, fcntl(process.control.get(), F_DUPFD_CLOEXEC, 0)) {
  listen();
}

Spawner::~Spawner() {
  boost::system::error_code ignored;
  control_.close(ignored);
  while (waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) continue;
}

Result<Spawner::Id> Spawner::start(const std::vector<std::string>& words, int channel, int log, Events events) {
  if (lost_) return Error{Code::host, "the process that starts handlers has ended: start the server anew"};
  const OrderHead head{Order::start, ++last_id_, 0};
  Message message;
  message.bytes.assign(reinterpret_cast<const char*>(&head), sizeof head);
  for (const std::string& word : words) message.bytes.append(word.c_str(), word.size() + 1);
  if (message.bytes.size() > sizeof head + kMostWords) return Error{Code::usage, "the handler's command is too long"};
  for (const int descriptor : {channel, log}) {
    message.descriptors.emplace_back(fcntl(descriptor, F_DUPFD_CLOEXEC, 0));
    if (!message.descriptors.back()) {
      return Error{Code::host, std::string("cannot start a handler: ") + std::strerror(errno)};
    }
  }
  children_[head.id] = std::move(events);
  send(std::move(message));
  return head.id;
}

void Spawner::signal(Id id, int number) {
  const OrderHead head{Order::signal, id, number};
  send({std::string(reinterpret_cast<const char*>(&head), sizeof head), {}});
}

void Spawner::kill(Id id) { signal(id, SIGKILL); }

void Spawner::forget(Id id) {
  kill(id);
  children_.erase(id);
}

void Spawner::send(Message message) {
  unsent_.push_back(std::move(message));
  flush();
}

void Spawner::flush() {
  while (!unsent_.empty() && !lost_) {
    Message& next = unsent_.front();
    alignas(cmsghdr) std::array<char, CMSG_SPACE(2 * sizeof(int))> rights{};
    iovec place{next.bytes.data(), next.bytes.size()};
    msghdr message{};
    message.msg_iov = &place;
    message.msg_iovlen = 1;
    if (next.descriptors.size() == 2) {
      message.msg_control = rights.data();
      message.msg_controllen = rights.size();
      cmsghdr* const control = CMSG_FIRSTHDR(&message);
      control->cmsg_level = SOL_SOCKET;
      control->cmsg_type = SCM_RIGHTS;
      control->cmsg_len = CMSG_LEN(2 * sizeof(int));
      const std::array<int, 2> both = {next.descriptors[0].get(), next.descriptors[1].get()};
      std::memcpy(CMSG_DATA(control), both.data(), sizeof both);
    }
    const ssize_t sent = sendmsg(control_.native_handle(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && errno == EAGAIN) break;
    unsent_.pop_front();  // what the other side does not get because it is gone, listen() finds out
  }
  if (unsent_.empty() || lost_ || waits_to_send_) return;
  waits_to_send_ = true;
  control_.async_wait(asio::posix::stream_descriptor::wait_write, guard_([this](boost::system::error_code ec) {
                        waits_to_send_ = false;
                        if (!ec) flush();
                      }));
}

void Spawner::listen() {
  control_.async_wait(asio::posix::stream_descriptor::wait_read, guard_([this](boost::system::error_code ec) {
                        if (!ec) on_report();
                      }));
}

void Spawner::on_report() {
  Report report;
  const ssize_t size = recv(control_.native_handle(), &report, sizeof report, MSG_DONTWAIT);
  if (size == 0 || (size < 0 && errno != EAGAIN && errno != EINTR)) return lose_all();
  if (size == static_cast<ssize_t>(sizeof report)) {
    const auto child = children_.find(report.id);
    if (child != children_.end() && report.news == News::started) child->second.started(report.pid);
    if (child != children_.end() && report.news == News::ended) {
      const Events events = std::move(child->second);
      children_.erase(child);
      events.ended(report.status, report.cpu_seconds);
    }
  }
  listen();
}

// The kernel ends the handlers of a spawner that is gone.
void Spawner::lose_all() {
  lost_ = true;
  for (auto& [id, events] : std::exchange(children_, {})) events.ended(-1, 0);
}

}  // namespace mctl
