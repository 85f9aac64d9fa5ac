// Starts handler processes from outside of the front's confinement.
//
// Handlers reach databases and other services, which the front's filter forbids, and children inherit a filter. So
// before it confines itself the front forks one small process of a single thread, which starts handlers when it is told
// to, and reports their ends. Each handler leads a process group of its own, which is killed as a whole when the
// handler has ended. Where the front is gone the spawner kills them all; where the spawner is gone the kernel does.
#pragma once

#include <sys/types.h>

#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "format/descriptor.h"
#include "format/result.h"
#include "pool/guard.h"

namespace mctl {

struct SpawnerProcess {
  pid_t pid = -1;
  Descriptor control;
};

// Forks it. While this process is not yet confined and has one thread. Code::host.
Result<SpawnerProcess> fork_spawner();

// The descriptor by which a handler process talks to the front, beside 0 (nothing), 1 and 2 (its log).
constexpr int kHandlerFd = 3;

// The front's side of it.
class Spawner {
 public:
  using Id = std::uint32_t;
  struct Events {
    std::function<void(pid_t)> started;
    // `status` as waitpid has it, -1 if nobody knows, and the processor time that the process used.
    std::function<void(int status, double cpu_seconds)> ended;
  };

  Spawner(boost::asio::io_context& io, SpawnerProcess process);
  ~Spawner();  // ends it, and all that it started

  // Runs these words, the first of which is looked for in $PATH. The descriptors are copied. A program that cannot be
  // run says why in its log and ends with 127. Code::host where nothing can be started any more.
  Result<Id> start(const std::vector<std::string>& words, int channel, int log, Events events);
  void signal(Id id, int number);
  void kill(Id id);    // with all of its group
  void forget(Id id);  // the same; nobody hears of its end

  pid_t pid() const { return pid_; }
  bool lost() const { return lost_; }  // nothing can be started any more

 private:
  struct Message {
    std::string bytes;
    std::vector<Descriptor> descriptors;
  };
  void send(Message message);
  void flush();
  void listen();
  void on_report();
  void lose_all();

  const pid_t pid_;
  boost::asio::posix::stream_descriptor control_;
  std::deque<Message> unsent_;
  bool waits_to_send_ = false, lost_ = false;
  Id last_id_ = 0;
  std::map<Id, Events> children_;
  const Guard guard_;
};

}  // namespace mctl
