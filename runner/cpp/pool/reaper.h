// The ends of child processes: one watch for all of them, whoever started them.
#pragma once

#include <sys/types.h>

#include <boost/asio/io_context.hpp>
#include <boost/asio/signal_set.hpp>
#include <functional>
#include <unordered_map>

namespace mctl {

class Reaper {
 public:
  // `status` as waitpid has it, and the processor time that the child used.
  using Ended = std::function<void(int status, double cpu_seconds)>;

  explicit Reaper(boost::asio::io_context& io);  // before the first child is started
  ~Reaper();                                     // kills those that are left, and waits for them

  void watch(pid_t pid, Ended ended);
  void kill(pid_t pid);  // nobody hears of its end any more

 private:
  void wait();
  void reap();

  boost::asio::signal_set signal_;
  std::unordered_map<pid_t, Ended> children_;
};

}  // namespace mctl
