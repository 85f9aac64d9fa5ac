#include "pool/handler_process.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

namespace mctl {
namespace {

using namespace std::chrono_literals;
namespace asio = boost::asio;
using asio::posix::stream_descriptor;
using boost::system::error_code;

constexpr auto kHeartbeat = 1s;             // between pings, and for an answer before the operator is told
constexpr auto kLongestStart = 300s;        // until it is ready
constexpr std::size_t kLongestLine = 8192;  // bytes of a line of its log; longer ones are cut
constexpr std::size_t kReadAtOnce = 16 << 10;
constexpr std::size_t kJoined = 4096;  // bytes of a body that are copied behind their header

std::string seconds_of(std::chrono::steady_clock::duration time) {
  return std::to_string(std::chrono::duration_cast<std::chrono::seconds>(time).count()) + " s";
}

}  // namespace

HandlerProcess::HandlerProcess(asio::io_context& io, Spawner& spawner, const HandlerLaunch& launch)
    : spawner_(spawner), launch_(launch), channel_(io), log_(io), timer_(io), reader_(launch.kept_body) {}

HandlerProcess::~HandlerProcess() {
  if (id_) spawner_.forget(*id_);
}

Status HandlerProcess::start(Events events) {
  events_ = std::move(events);
  std::array<int, 2> channel, log;
  const auto failed = [] { return Error{Code::host, std::string("cannot start a handler: ") + std::strerror(errno)}; };
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, channel.data()) != 0) return failed();
  channel_.assign(channel[0]);
  const Descriptor its_channel(channel[1]);
  if (pipe2(log.data(), O_CLOEXEC) != 0) return failed();
  log_.assign(log[0]);
  const Descriptor its_log(log[1]);
  channel_.non_blocking(true);
  log_.non_blocking(true);
  Spawner::Events told;
  told.started = guard_([this](pid_t pid) { pid_ = pid; });
  told.ended = guard_([this](int status, double cpu_seconds) { on_end(status, cpu_seconds); });
  const auto id = spawner_.start(launch_.command, its_channel.get(), its_log.get(), std::move(told));
  if (!id) return id.error();
  id_ = *id;
  started_ = Clock::now();
  wait_for_channel();
  wait_for_log();
  tick();
  return Done{};
}

void HandlerProcess::kill(const std::string& why) {
  if (!id_ || !why_killed_.empty()) return;
  why_killed_ = why;
  spawner_.kill(*id_);
}

// --- frames to it

void HandlerProcess::send(std::string_view header, std::span<const Bytes> body) {
  if (closed_) return;
  std::size_t size = 0;
  for (const Bytes part : body) size += part.size();
  std::string frame = frame_start(header, size);
  frame.reserve(frame.size() + size);
  for (const Bytes part : body) frame.append(reinterpret_cast<const char*>(part.data()), part.size());
  unsent_bytes_ += frame.size();
  unsent_.push_back(std::move(frame));
  if (!waits_to_send_) flush();
}

void HandlerProcess::flush() {
  while (!unsent_.empty()) {
    std::array<iovec, 16> places;
    std::size_t count = 0;
    for (; count < std::min(places.size(), unsent_.size()); ++count) {
      const std::size_t at = count == 0 ? sent_of_first_ : 0;
      places[count] = {unsent_[count].data() + at, unsent_[count].size() - at};
    }
    msghdr message{};
    message.msg_iov = places.data();
    message.msg_iovlen = count;
    const ssize_t sent = sendmsg(channel_.native_handle(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && (errno == EAGAIN || errno == ENOBUFS)) break;
    if (sent < 0) return;  // it is gone, or about to be
    unsent_bytes_ -= static_cast<std::size_t>(sent);
    sent_of_first_ += static_cast<std::size_t>(sent);
    while (!unsent_.empty() && sent_of_first_ >= unsent_.front().size()) {
      sent_of_first_ -= unsent_.front().size();
      unsent_.pop_front();
    }
  }
  if (unsent_.empty() || waits_to_send_) return;
  waits_to_send_ = true;
  channel_.async_wait(stream_descriptor::wait_write, guard_([this](error_code ec) {
                        waits_to_send_ = false;
                        if (!ec) flush();
                      }));
}

// --- frames from it

void HandlerProcess::listen(bool wanted) {
  listens_ = wanted;
  if (wanted) wait_for_channel();
}

void HandlerProcess::wait_for_channel() {
  if (waits_to_read_ || !listens_ || closed_) return;
  waits_to_read_ = true;
  channel_.async_wait(stream_descriptor::wait_read, guard_([this](error_code ec) {
                        waits_to_read_ = false;
                        if (!ec && listens_) read_channel();
                        wait_for_channel();
                      }));
}

// What is there, once; false if there was nothing.
bool HandlerProcess::read_channel() {
  if (closed_) return false;
  const auto room = reader_.room();
  const ssize_t count = ::read(channel_.native_handle(), room.data(), room.size());
  if (count < 0) return errno == EINTR;
  if (count == 0) {  // it closed its end, or is about to end
    closed_ = true;
    return false;
  }
  reader_.filled(static_cast<std::size_t>(count));
  return take_frames();
}

bool HandlerProcess::take_frames() {
  for (;;) {
    const auto frame = reader_.next();
    if (!frame) {
      events_.noted("a handler sent what is no frame: " + frame.error().text);
      closed_ = true;
      kill("broken");
      return false;
    }
    if (!*frame) return true;
    take(**frame);
    if (closed_) return false;
  }
}

void HandlerProcess::take(const Frame& frame) {
  auto message = parse_from_handler(frame.header, frame.skipped ? std::nullopt : std::optional(frame.body));
  if (!message) {
    events_.noted(message.error().text);
    closed_ = true;
    return kill("broken");
  }
  if (const auto* pong = std::get_if<HandlerPong>(&*message)) {
    pongs_ = std::max(pongs_, std::min(pong->number, pings_));
    return;
  }
  if (std::holds_alternative<HandlerReady>(*message)) ready_ = true;
  events_.said(*message, frame);
}

// --- its log

void HandlerProcess::wait_for_log() {
  log_.async_wait(stream_descriptor::wait_read, guard_([this](error_code ec) {
                    if (!ec) read_log();
                  }));
}

void HandlerProcess::read_log() {
  std::array<char, kReadAtOnce> text;
  const ssize_t count = ::read(log_.native_handle(), text.data(), text.size());
  if (count > 0) take_log({text.data(), static_cast<std::size_t>(count)});
  if (count > 0 || (count < 0 && (errno == EAGAIN || errno == EINTR))) wait_for_log();
}

void HandlerProcess::take_log(std::string_view text) {
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    const std::size_t taken = std::min(end, kLongestLine - line_.size());
    line_ += text.substr(0, taken);
    const bool whole = taken == end && end < text.size();
    text.remove_prefix(taken + (whole ? 1 : 0));
    if (!whole && line_.size() < kLongestLine) return;
    events_.logged(line_);
    line_.clear();
  }
}

// --- its heart

void HandlerProcess::tick() {
  look_at_heart();
  const auto period = std::clamp<Clock::duration>(launch_.timeout / 4, 100ms, kHeartbeat);
  timer_.expires_after(period);
  timer_.async_wait(guard_([this](error_code ec) {
    if (!ec) tick();
  }));
}

void HandlerProcess::look_at_heart() {
  const auto now = Clock::now();
  if (closed_) return kill("broken");  // it says nothing more, and has not ended
  if (!ready_) {
    if (now - started_ >= kLongestStart) kill("stuck");
    return;
  }
  if (!listens_) {  // it may have answered
    pinged_ = now;
    return;
  }
  if (pongs_ == pings_) {
    if (told_blocked_) events_.noted("a handler's loop turns again, after " + seconds_of(now - pinged_));
    told_blocked_ = false;
    if (pings_ > 0 && now - pinged_ < kHeartbeat) return;
    pinged_ = now;
    return send(ping_header(++pings_));
  }
  if (now - pinged_ >= launch_.timeout) return kill("stuck");
  if (now - pinged_ < kHeartbeat || told_blocked_) return;
  told_blocked_ = true;
  events_.noted("warning: a handler (process " + std::to_string(pid_) +
                ") blocks its event loop: what it does is in its stack, below; a new process takes its place after " +
                std::to_string(launch_.timeout.count()) + " s");
  spawner_.signal(*id_, SIGUSR1);
}

// --- its end

void HandlerProcess::on_end(int status, double cpu_seconds) {
  id_.reset();
  timer_.cancel();
  listens_ = false;
  while (read_channel()) continue;  // its last words
  closed_ = true;
  for (std::array<char, kReadAtOnce> text;;) {
    const ssize_t count = ::read(log_.native_handle(), text.data(), text.size());
    if (count <= 0) break;
    take_log({text.data(), static_cast<std::size_t>(count)});
  }
  if (!line_.empty()) events_.logged(line_);
  const Events events = std::move(events_);
  events.ended(status, why_killed_, cpu_seconds);
}

}  // namespace mctl
