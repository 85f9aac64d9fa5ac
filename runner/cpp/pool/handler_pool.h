// The handler processes of one model and their lives: starts them, says what they say, replaces those that end or hang.
#pragma once

#include <sys/types.h>

#include <boost/asio/io_context.hpp>
#include <boost/asio/steady_timer.hpp>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "format/result.h"
#include "pool/backoff.h"
#include "pool/guard.h"
#include "pool/handler_messages.h"
#include "pool/handler_process.h"
#include "pool/spawner.h"

namespace mctl {

class HandlerPool {
 public:
  // What happens to processes, by their index.
  struct Events {
    std::function<void(std::size_t, FromHandler& message, const Frame& frame)> said;  // by a live one
    std::function<void(std::size_t)> died;                                            // one that was live
    std::function<void()> changed;                                                    // ready, or not
    std::function<void(const Error&)> hopeless;             // none can start; before the first was ready
    std::function<void(const std::string&)> logged, noted;  // by the handler; for the operator
    std::function<void(const std::string&)> replaced;       // why: crash, stuck, broken, load
    std::function<void(double cpu_seconds)> ended;          // a process of it
  };

  // `init` is the first frame's header.
  HandlerPool(boost::asio::io_context& io, Spawner& spawner, HandlerLaunch launch, std::string init,
              std::size_t processes);

  Status start(Events events);
  std::size_t size() const { return slots_.size(); }
  bool live(std::size_t index) const { return slots_[index].live; }
  void send(std::size_t index, std::string_view header, std::span<const Bytes> body = {});
  void listen(std::size_t index, bool wanted) { slots_[index].process->listen(wanted); }
  std::size_t unsent(std::size_t index) const { return slots_[index].process->unsent(); }
  void proved(std::size_t index) { slots_[index].backoff.reset(); }  // it answered
  void kill(std::size_t index, const std::string& why);
  // They finish what they do, and are not replaced.
  void drain();
  bool over() const;                                 // none is left
  bool given_up() const { return spawner_.lost(); }  // and none will come

  bool ready() const;
  std::optional<Error> away() const;  // as Pool says it
  std::string why_not() const;
  // What the first process said it answers, beside the model's own paths.
  const std::vector<HandlerRoute>& routes() const { return routes_; }
  std::vector<pid_t> pids() const;

 private:
  struct Slot {
    std::unique_ptr<HandlerProcess> process;
    bool live = false, failed = false;
    std::unique_ptr<boost::asio::steady_timer> restart;
    Backoff backoff;
  };

  Status spawn(std::size_t index);
  void on_said(std::size_t index, FromHandler& message, const Frame& frame);
  void on_ready(std::size_t index, HandlerReady& ready);
  void on_failed(std::size_t index, const HandlerFailed& failed);
  void on_end(std::size_t index, int status, const std::string& why);
  void restart_later(std::size_t index);

  boost::asio::io_context& io_;
  Spawner& spawner_;
  const HandlerLaunch launch_;
  const std::string init_;
  Events events_;
  std::vector<Slot> slots_;
  std::vector<HandlerRoute> routes_;
  std::string last_error_, last_line_;
  bool was_ready_ = false, draining_ = false;
  std::unique_ptr<boost::asio::steady_timer> patience_;  // with those that drain
  const Guard guard_;
};

}  // namespace mctl
