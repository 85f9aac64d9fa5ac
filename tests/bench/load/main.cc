// An open-loop load generator: requests leave at their times whatever the server does, and every answer is checked.
//
// One thread; one HTTP/1.1 request at a time on each connection. Latency counts from the time at which a request was
// meant to leave, so that a server that stalls cannot hide it. Bounded in requests and in time; loopback only.
// tests/bench/load.py builds it, makes its cases, and reads the JSON object that it prints.

#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <deque>
#include <iostream>

#include "answer.h"
#include "plan.h"
#include "tally.h"

namespace load {
namespace {

using Ns = std::int64_t;  // CLOCK_MONOTONIC

constexpr Ns kSecond = 1'000'000'000;
constexpr std::size_t kNone = SIZE_MAX, kNotes = 5;  // kNotes: so many faults are told in words

Ns now() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * kSecond + t.tv_nsec;
}

Ns span_of(double seconds) { return static_cast<Ns>(seconds * static_cast<double>(kSecond)); }

std::uint32_t microseconds(Ns span) { return static_cast<std::uint32_t>(std::clamp<Ns>(span / 1000, 0, UINT32_MAX)); }

[[noreturn]] void fail() { throw std::runtime_error(std::strerror(errno)); }

struct Connection {
  int fd = -1;
  bool connected = false, wants_to_send = false;
  std::size_t request = kNone;  // the arrival that waits for its answer
  std::size_t sent = 0;         // bytes of it
  Ns left = 0;                  // when its first byte was sent, or could have been
  std::string answer;
};

class Run {
 public:
  Run(const Options& options, const std::vector<Arrival>& arrivals)
      : options_(options), arrivals_(arrivals), tallies_(options.phases.size()), connections_(options.connections) {
    for (Connection& connection : connections_) closed_.push_back(&connection);
    if (epoll_ < 0 || timer_ < 0) fail();
    watch(timer_, EPOLL_CTL_ADD, EPOLLIN, nullptr);
  }

  void go() {
    const Ns end = due_at(arrivals_.size() - 1) + span_of(options_.grace);
    while (done_ < arrivals_.size() && now() < end) {
      dispatch();
      arm(end);
      std::array<epoll_event, 256> events;
      const int count = epoll_wait(epoll_, events.data(), events.size(), 1000);
      for (int i = 0; i < count; ++i) {
        if (events[i].data.ptr) serve(*static_cast<Connection*>(events[i].data.ptr), events[i].events);
      }
      lose_patience();
    }
    finished_ = now();
    for (Connection& connection : connections_) {
      if (connection.request != kNone) drop(connection, lost, "no answer before the end");
    }
    for (; next_ < arrivals_.size(); ++next_) settle(next_, unsent);
  }

  void print() const {
    Tally all;
    std::string phases, notes;
    for (std::size_t i = 0; i < tallies_.size(); ++i) {
      all.merge(tallies_[i]);
      phases += (i ? ",{\"rate\":" : "{\"rate\":") + std::to_string(options_.phases[i].rate) +
                ",\"seconds\":" + std::to_string(options_.phases[i].seconds) + ',' + members_of(tallies_[i]) + '}';
    }
    for (const std::string& note : notes_) notes += (notes.empty() ? "" : ",") + quoted(note);
    const double seconds = static_cast<double>(finished_ - start_) / static_cast<double>(kSecond);
    std::cout << "{\"seed\":" << options_.seed << ",\"connections\":" << connections_.size()
              << ",\"requests\":" << arrivals_.size() << ",\"seconds\":" << seconds
              << ",\"longest_gap_us\":" << longest_gap_ / 1000 << ',' << members_of(all) << ",\"phases\":[" << phases
              << "],\"notes\":[" << notes << "]}\n";
  }

 private:
  Ns due_at(std::size_t request) const { return start_ + span_of(arrivals_[request].seconds); }
  Tally& tally(std::size_t request) { return tallies_[arrivals_[request].phase]; }
  const Case& case_of(std::size_t request) const { return options_.cases[arrivals_[request].which]; }

  void watch(int fd, int operation, std::uint32_t wanted, Connection* connection) const {
    epoll_event event{};
    event.events = wanted;
    event.data.ptr = connection;
    if (epoll_ctl(epoll_, operation, fd, &event) != 0) fail();
  }

  // Wakes the loop when something has to be done without an event of a socket.
  void arm(Ns end) const {
    Ns at = end;
    const bool blocked = idle_.empty() && closed_.empty();
    if (next_ < arrivals_.size() && !blocked) at = std::min(at, due_at(next_));
    if (!patience_.empty()) at = std::min(at, patience_.front().until);
    itimerspec spec{};
    spec.it_value = {at / kSecond, at % kSecond};
    timerfd_settime(timer_, TFD_TIMER_ABSTIME, &spec, nullptr);
  }

  // Sends what is due, as far as connections are free.
  void dispatch() {
    for (Ns time; next_ < arrivals_.size() && due_at(next_) <= (time = now());) {
      auto& free = idle_.empty() ? closed_ : idle_;
      if (free.empty()) return;
      Connection& connection = *free.back();
      free.pop_back();
      connection.request = next_++;
      connection.sent = 0;
      connection.left = time;
      connection.answer.clear();
      tally(connection.request).delay_us.push_back(microseconds(time - due_at(connection.request)));
      if (options_.patience > 0)
        patience_.push_back({time + span_of(options_.patience), connection.request, &connection});
      if (connection.connected) {
        send_rest(connection);
      } else {
        open(connection);
      }
    }
  }

  void open(Connection& connection) {
    connection.fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (connection.fd < 0) fail();
    const int yes = 1;
    setsockopt(connection.fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(options_.port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    watch(connection.fd, EPOLL_CTL_ADD, EPOLLIN | EPOLLOUT, &connection);
    connection.wants_to_send = true;
    if (connect(connection.fd, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0 && errno != EINPROGRESS) {
      drop(connection, unreachable, std::strerror(errno));
    }
  }

  void serve(Connection& connection, std::uint32_t events) {
    if (connection.fd < 0) return;
    if (!connection.connected) {
      int error = 0;
      socklen_t size = sizeof error;
      getsockopt(connection.fd, SOL_SOCKET, SO_ERROR, &error, &size);
      if (error != 0) return drop(connection, unreachable, std::strerror(error));
      connection.connected = true;
    }
    if (events & EPOLLOUT) send_rest(connection);
    if (events & (EPOLLIN | EPOLLHUP | EPOLLERR)) receive(connection);
  }

  void send_rest(Connection& connection) {
    const std::string_view request = case_of(connection.request).request;
    while (connection.sent < request.size()) {
      const auto rest = request.substr(connection.sent);
      const ssize_t count = send(connection.fd, rest.data(), rest.size(), MSG_NOSIGNAL);
      if (count < 0) break;  // the socket is full, or broken, which the next read tells
      connection.sent += static_cast<std::size_t>(count);
    }
    const bool wants_to_send = connection.sent < request.size() && errno == EAGAIN;
    if (wants_to_send != connection.wants_to_send) {
      watch(connection.fd, EPOLL_CTL_MOD, wants_to_send ? EPOLLIN | EPOLLOUT : EPOLLIN, &connection);
      connection.wants_to_send = wants_to_send;
    }
  }

  void receive(Connection& connection) {
    std::array<char, 65536> buffer;
    const ssize_t count = recv(connection.fd, buffer.data(), buffer.size(), 0);
    if (count < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (count <= 0) return drop(connection, lost, count < 0 ? std::strerror(errno) : "closed before the answer");
    if (connection.request == kNone) {
      note("bytes that nobody asked for");
      return drop(connection, lost, "");
    }
    connection.answer.append(buffer.data(), static_cast<std::size_t>(count));
    try {
      Head head;
      if (!parse_head(connection.answer, head) || connection.answer.size() < head.size + head.body) return;
      if (connection.answer.size() > head.size + head.body) throw std::runtime_error("more bytes than one answer has");
      answered(connection, head);
    } catch (const std::exception& error) {
      drop(connection, lost, error.what());
    }
  }

  void answered(Connection& connection, const Head& head) {
    const std::size_t request = connection.request;
    const Ns time = now();
    const auto outputs = std::string_view(connection.answer).substr(head.size + head.json, head.body - head.json);
    ++tally(request).statuses[head.status];
    Outcome outcome = outcome_of(head.status);
    if (head.status == 200) {
      const std::string fault = fault_of(outputs, case_of(request).expected, options_.rtol, options_.atol);
      outcome = fault.empty() ? right : wrong;
      if (outcome == wrong) note("case " + std::to_string(arrivals_[request].which) + ": " + fault);
    } else if (outcome == failed) {
      note(std::to_string(head.status) + ": " + connection.answer.substr(head.size, 200));
    }
    if (outcome == right) {
      tally(request).right_us.push_back(microseconds(time - due_at(request)));
      longest_gap_ = std::max(longest_gap_, time - last_right_);
      last_right_ = time;
    }
    if (outcome == refused) tally(request).refused_us.push_back(microseconds(time - connection.left));
    settle(request, outcome);
    connection.request = kNone;
    if (head.close || connection.sent < case_of(request).request.size()) {
      close(connection);
    } else {
      idle_.push_back(&connection);
    }
  }

  // The connection is of no use any more; the request that waited on it, if any, ends with `outcome`.
  void drop(Connection& connection, Outcome outcome, const char* why) {
    if (connection.request == kNone) {
      std::erase(idle_, &connection);
    } else {
      if (outcome != abandoned) note(std::string(kNames[outcome]) + ": " + why);
      settle(connection.request, outcome);
      connection.request = kNone;
    }
    close(connection);
  }

  void close(Connection& connection) {
    ::close(connection.fd);
    connection.fd = -1;
    connection.connected = connection.wants_to_send = false;
    closed_.push_back(&connection);
  }

  void lose_patience() {
    for (; !patience_.empty() && patience_.front().until <= now(); patience_.pop_front()) {
      const Patience& over = patience_.front();
      if (over.connection->request == over.request) drop(*over.connection, abandoned, "");
    }
  }

  void settle(std::size_t request, Outcome outcome) {
    ++tally(request).counts[outcome];
    ++done_;
  }

  void note(std::string text) {
    if (notes_.size() < kNotes) notes_.push_back(std::move(text));
  }

  struct Patience {
    Ns until;
    std::size_t request;
    Connection* connection;
  };

  const Options& options_;
  const std::vector<Arrival>& arrivals_;
  std::vector<Tally> tallies_;
  std::vector<Connection> connections_;
  std::vector<Connection*> idle_, closed_;
  std::deque<Patience> patience_;  // ascending
  std::vector<std::string> notes_;
  std::size_t next_ = 0, done_ = 0;  // arrivals that were sent, and that have an outcome
  const int epoll_ = epoll_create1(EPOLL_CLOEXEC), timer_ = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC);
  const Ns start_ = now();
  Ns finished_ = 0, last_right_ = start_, longest_gap_ = 0;
};

}  // namespace
}  // namespace load

int main(int count, char** words) {
  try {
    load::Options options = load::options_from({words + 1, static_cast<std::size_t>(count - 1)});
    const auto arrivals = load::arrivals_from(options);
    if (options.only_arrivals) {
      for (const auto& arrival : arrivals) std::printf("%.9f\n", arrival.seconds);
      return 0;
    }
    load::Run run(options, arrivals);
    run.go();
    run.print();
    return 0;
  } catch (const std::invalid_argument& error) {
    std::cerr << "error: " << error.what() << '\n';
    return 2;
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << '\n';
    return 1;
  }
}
