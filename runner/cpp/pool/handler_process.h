// One handler process: frames to and from it, its log, and whether its loop still turns.
#pragma once

#include <sys/types.h>

#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "format/result.h"
#include "pool/frame.h"
#include "pool/guard.h"
#include "pool/handler_messages.h"
#include "pool/spawner.h"

namespace mctl {

using Bytes = std::span<const std::byte>;

struct HandlerLaunch {
  std::vector<std::string> command;
  std::size_t kept_body = 64 << 20;  // bytes of a frame's body that is not left out
  std::chrono::seconds timeout{60};  // how long its loop may be blocked
};

class HandlerProcess {
 public:
  struct Events {
    // `frame` has its bytes until this returns. Also of a process that is about to end, as long as it said something.
    std::function<void(FromHandler& message, const Frame& frame)> said;
    std::function<void(const std::string& line)> logged;  // by the process
    std::function<void(const std::string&)> noted;        // about it, for the operator
    // Nothing comes after it. `why`: stuck, broken, or what it was killed for; empty: by itself.
    std::function<void(int status, const std::string& why, double cpu_seconds)> ended;
  };

  HandlerProcess(boost::asio::io_context& io, Spawner& spawner, const HandlerLaunch& launch);
  ~HandlerProcess();  // ends it

  Status start(Events events);
  void send(std::string_view header, std::span<const Bytes> body = {});
  void kill(const std::string& why);
  // While a process has too much of the front's memory, what it says stays unread.
  void listen(bool wanted);

  pid_t pid() const { return pid_; }
  std::size_t unsent() const { return unsent_bytes_; }

 private:
  using Clock = std::chrono::steady_clock;

  void flush();
  void wait_for_channel();
  bool read_channel();
  bool take_frames();
  void take(const Frame& frame);
  void wait_for_log();
  void read_log();
  void take_log(std::string_view text);
  void tick();
  void look_at_heart();
  void on_end(int status, double cpu_seconds);

  Spawner& spawner_;
  const HandlerLaunch& launch_;
  Events events_;
  boost::asio::posix::stream_descriptor channel_, log_;
  boost::asio::steady_timer timer_;
  FrameReader reader_;
  std::optional<Spawner::Id> id_;
  pid_t pid_ = -1;
  std::string why_killed_;

  std::deque<std::string> unsent_;
  std::size_t unsent_bytes_ = 0, sent_of_first_ = 0;
  bool waits_to_send_ = false, waits_to_read_ = false, listens_ = true, closed_ = false;
  std::string line_;  // of its log, so far

  bool ready_ = false, told_blocked_ = false;
  std::uint64_t pings_ = 0, pongs_ = 0;
  Clock::time_point started_, pinged_;
  const Guard guard_;
};

}  // namespace mctl
