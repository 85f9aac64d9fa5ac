// The handler of one model: requests queue, go to its processes, and come back as answers or streams; what the
// processes call is handed up. One thread, no locks.
//
// 1. A process has at most `concurrency` requests; the others wait, clients in turn (shares.h).
// 2. A request that is over for its client (answered late, cancelled) has its place in the process until that says so.
// 3. What was in a process that died runs once more, alone in its process; if that dies too, it was this request.
// 4. An answer that has begun is not begun again: it breaks off.
// 5. A process that keeps a request that is over for longer than `timeout` is replaced.
// 6. While none lives, requests wait for one. After three starts that fail in a row they are refused (backoff.h).
#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/call.h"
#include "engine/metrics.h"
#include "engine/shares.h"
#include "format/result.h"
#include "pool/guard.h"
#include "pool/handler_messages.h"
#include "pool/handler_pool.h"
#include "pool/spawner.h"

namespace mctl {

// One request to a handler on its way, whichever door it came in by. A door derives from it and keeps what it views.
struct HandlerTask {
  virtual ~HandlerTask() = default;
  // Exactly one of these, unless it is cancelled: an answer; or an error, of which the client gets no more than that.
  virtual void answered(HandlerAnswer& answer, Bytes body) = 0;
  virtual void failed(const Error& error) = 0;
  // Or a stream: begun, its parts, its end (nullptr: in good order).
  virtual void begun(StreamStart& start) = 0;
  virtual void part(Bytes bytes) = 0;
  virtual void ended(const Error* error) = 0;

  HandlerRequest request;  // `id` and `deadline_ms` are the handler's to set
  Bytes body;
  Client client = 0;
  std::int64_t arrival_ns = 0, deadline_ns = 0;
  bool deadline_stated = false;  // by the client; not the default

  // The handler's own.
  std::int64_t turn = 0;
  bool over = false, retried = false, streams = false;
  std::deque<std::size_t> unread;  // bytes of the parts that the client has not taken
  std::size_t unread_bytes = 0;
};

struct HandlerSettings {
  std::string handler, assets;  // as HandlerInit has them; no handler: none
  std::vector<std::string> command;
  std::int64_t processes = 1, concurrency = 64;
  std::int64_t timeout_s = 60;
  std::size_t most_body = 64 << 20;  // bytes of an answer, and of a call's tensors
};

// Whose request it is that a handler calls a model for.
struct Caller {
  Client client = 0;
  std::int64_t deadline_ns = 0;
  bool deadline_stated = false;
  std::string request_id, key;
};

// Where a call came from, and its result goes.
struct CallOrigin {
  std::size_t process = 0;
  std::uint64_t epoch = 0;  // of the process: counts its deaths
  std::uint64_t id = 0, call = 0;
};

class ServedHandler {
 public:
  using Cancel = std::function<void()>;
  struct Events {
    // A call of a model, to be answered by result() or refuse(), now or later. What is returned is called if nobody
    // waits for it any more.
    std::function<Cancel(const CallOrigin&, HandlerCall& call, const Caller& caller)> called;
    std::function<void()> changed;                          // ready, or not
    std::function<void(const Error&)> failed;               // cannot start; before it was ready
    std::function<void(const std::string&)> logged, noted;  // by the handler; for the operator
  };

  ServedHandler(boost::asio::io_context& io, Spawner& spawner, HandlerSettings settings, std::string init);

  Status start(Events events);
  Status admit(Client client) const;  // Code::unavailable if one more finds no room
  Status submit(std::shared_ptr<HandlerTask> task);
  void cancel(HandlerTask& task);  // its client went away: nothing more of it
  void taken(HandlerTask& task);   // the client has taken the oldest part of a stream

  void result(const CallOrigin& origin, std::string_view header, std::span<const Bytes> body);
  void refuse(const CallOrigin& origin, unsigned status, std::string_view error);

  void drain();
  bool idle() const;
  Status ready() const;
  bool takes_requests() const { return !pool_.away(); }  // as ServedModel says it
  const std::vector<HandlerRoute>& routes() const { return pool_.routes(); }
  const HandlerMetrics& metrics() const { return metrics_; }
  HandlerMetrics& metrics() { return metrics_; }
  HandlerGauges gauges() const;

 private:
  struct Running {
    std::shared_ptr<HandlerTask> task;  // nullptr: it is over for its client
    Caller caller;
    std::int64_t over_ns = 0;  // since when
  };
  struct ModelCall {
    Cancel cancel;
    std::size_t bytes = 0;
  };
  struct Process {
    std::uint64_t epoch = 0;
    std::unordered_map<std::uint64_t, Running> running;
    std::map<std::pair<std::uint64_t, std::uint64_t>, ModelCall> calls;  // by request and call
    std::size_t held = 0;                                                // bytes of calls
    bool alone = false;  // it has one request, that was in a process that died
  };

  std::int64_t capacity() const;
  Error full() const;
  bool make_room();
  void enqueue(std::shared_ptr<HandlerTask> task);
  bool leave_queue(const HandlerTask& task);
  void dispatch();
  std::optional<std::size_t> place_for(const HandlerTask& task, std::optional<std::size_t>& reserved) const;
  void give(std::size_t process, const std::shared_ptr<HandlerTask>& task);

  void on(std::size_t process, HandlerCall& call, const Frame& frame);
  void on(std::size_t process, HandlerUncall& call, const Frame& frame);
  void on(std::size_t process, HandlerAnswer& answer, const Frame& frame);
  void on(std::size_t process, StreamStart& start, const Frame& frame);
  void on(std::size_t process, StreamPart& part, const Frame& frame);
  void on(std::size_t process, StreamEnd& end, const Frame& frame);
  void on(std::size_t process, StreamBreak& end, const Frame& frame);
  template <class Other>
  void on(std::size_t, Other&, const Frame&) {}  // what the pool has seen to
  void end_stream(std::size_t process, std::uint64_t id, const Error* error);
  std::shared_ptr<HandlerTask> finish(std::size_t process, std::uint64_t id);
  HandlerTask* task_of(std::size_t process, std::uint64_t id);

  void died(std::size_t process);
  void end(HandlerTask& task, const Error& error);
  void abandon(const HandlerTask& task);
  bool end_call(const CallOrigin& origin);
  void wake_at(std::int64_t at_ns);
  void on_timer();
  void drain_pool();
  bool quiet() const;

  const HandlerSettings settings_;
  HandlerPool pool_;
  HandlerMetrics metrics_;
  Events events_;
  std::vector<Process> processes_;
  std::deque<std::shared_ptr<HandlerTask>> queue_;
  Shares shares_;
  std::uint64_t last_id_ = 0;
  boost::asio::steady_timer timer_;
  std::int64_t timer_ns_ = 0;  // when it goes off; 0: it is not set
  bool draining_ = false;
  const Guard guard_;
};

}  // namespace mctl
