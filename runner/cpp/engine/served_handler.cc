#include "engine/served_handler.h"

#include <algorithm>

#include "engine/batcher.h"

namespace mctl {
namespace {

namespace asio = boost::asio;

constexpr std::int64_t kMillisecond = 1'000'000, kSecond = 1'000'000'000;  // ns
constexpr std::int64_t kLeastQueue = 256;                                  // requests
constexpr std::size_t kMostCalls = 1024;                                   // of a process, at the same time
constexpr std::size_t kMostHeld = 256 << 20;   // bytes of a process's calls, before it stays unread
constexpr std::size_t kMostUnsent = 64 << 20;  // bytes that a process has not read, before it gets more requests
constexpr std::size_t kWindowParts = 16, kWindowBytes = 1 << 20, kLargestPart = 1 << 20;  // of a stream

HandlerLaunch launch_of(const HandlerSettings& settings) {
  return {settings.command, settings.most_body, std::chrono::seconds(settings.timeout_s)};
}

Error too_late(std::string_view where) {
  return {Code::deadline, "the request's deadline passed " + std::string(where)};
}

}  // namespace

ServedHandler::ServedHandler(asio::io_context& io, Spawner& spawner, HandlerSettings settings, std::string init)
    : settings_(std::move(settings)),
      pool_(io, spawner, launch_of(settings_), std::move(init), static_cast<std::size_t>(settings_.processes)),
      processes_(static_cast<std::size_t>(settings_.processes)),
      timer_(io) {}

Status ServedHandler::start(Events events) {
  events_ = std::move(events);
  HandlerPool::Events pool;
  pool.said = [this](std::size_t process, FromHandler& message, const Frame& frame) {
    std::visit([&](auto& any) { on(process, any, frame); }, message);
  };
  pool.died = [this](std::size_t process) { died(process); };
  pool.changed = [this] {
    const auto away = pool_.away();
    while (away && !queue_.empty()) end(*std::shared_ptr(queue_.front()), *away);
    dispatch();
    events_.changed();
  };
  pool.hopeless = [this](const Error& error) { events_.failed(error); };
  pool.logged = [this](const std::string& line) { events_.logged(line); };
  pool.noted = [this](const std::string& text) { events_.noted(text); };
  pool.replaced = [this](const std::string& why) { ++metrics_.restarts[why]; };
  pool.ended = [this](double cpu_seconds) { metrics_.ended_cpu_seconds += cpu_seconds; };
  return pool_.start(std::move(pool));
}

// --- the queue

std::int64_t ServedHandler::capacity() const {
  return std::max(kLeastQueue, 4 * settings_.processes * settings_.concurrency);
}

Error ServedHandler::full() const {
  return {Code::unavailable, "the handler's queue is full: " + std::to_string(queue_.size()) + " requests wait"};
}

Status ServedHandler::admit(Client client) const {
  if (auto why = pool_.away()) return *std::move(why);
  const bool room = static_cast<std::int64_t>(queue_.size()) < capacity();
  return room || shares_.entitled(client, 1, capacity()) ? Status(Done{}) : full();
}

// Refuses the latest request of the client that has the most.
bool ServedHandler::make_room() {
  if (static_cast<std::int64_t>(queue_.size()) < capacity()) return true;
  const Client largest = shares_.largest();
  const auto last = std::find_if(queue_.rbegin(), queue_.rend(),
                                 [&](const auto& task) { return task->client == largest && !task->retried; });
  if (last == queue_.rend()) return false;
  end(*std::shared_ptr(*last), full());
  return true;
}

Status ServedHandler::submit(std::shared_ptr<HandlerTask> task) {
  if (auto admitted = admit(task->client); !admitted) return admitted;
  if (!make_room()) return full();
  task->turn = shares_.join(task->client, 1);
  wake_at(task->deadline_ns);
  enqueue(std::move(task));
  dispatch();
  return Done{};
}

// What was in a process already comes before all else, then who has the earlier turn.
void ServedHandler::enqueue(std::shared_ptr<HandlerTask> task) {
  const auto after = [&](const auto& other) {
    return task->retried != other->retried ? task->retried : task->turn < other->turn;
  };
  auto place = queue_.end();
  while (place != queue_.begin() && after(*std::prev(place))) --place;
  queue_.insert(place, std::move(task));
}

bool ServedHandler::leave_queue(const HandlerTask& task) {
  const auto found = std::ranges::find(queue_, &task, [](const auto& each) { return each.get(); });
  if (found == queue_.end()) return false;
  shares_.leave(task.client, 1);
  queue_.erase(found);
  return true;
}

// --- requests go to processes

// A request that was in a process that died waits for an empty process; the one that will be empty first gets nothing
// else meanwhile.
std::optional<std::size_t> ServedHandler::place_for(const HandlerTask& task,
                                                    std::optional<std::size_t>& reserved) const {
  std::optional<std::size_t> best;
  for (std::size_t i = 0; i < processes_.size(); ++i) {
    if (!pool_.live(i) || processes_[i].alone || i == reserved) continue;
    if (!best || processes_[i].running.size() < processes_[*best].running.size()) best = i;
  }
  if (!best) return std::nullopt;
  const std::size_t running = processes_[*best].running.size();
  if (task.retried) {
    if (running == 0) return best;
    reserved = best;
    return std::nullopt;
  }
  const bool room = static_cast<std::int64_t>(running) < settings_.concurrency && pool_.unsent(*best) < kMostUnsent;
  return room ? best : std::nullopt;
}

void ServedHandler::dispatch() {
  drain_pool();
  std::optional<std::size_t> reserved;
  for (std::size_t at = 0; at < queue_.size();) {
    const auto place = place_for(*queue_[at], reserved);
    if (!place && !queue_[at]->retried) return;
    if (!place) {
      ++at;
      continue;
    }
    const auto task = queue_[at];
    queue_.erase(queue_.begin() + static_cast<std::ptrdiff_t>(at));
    shares_.leave(task->client, 1);
    shares_.started(task->turn);
    give(*place, task);
  }
}

void ServedHandler::give(std::size_t process, const std::shared_ptr<HandlerTask>& task) {
  HandlerRequest& request = task->request;
  request.id = ++last_id_;
  request.deadline_ms = std::max<std::int64_t>(1, (task->deadline_ns - now_ns()) / kMillisecond);
  Caller caller{task->client, task->deadline_ns, task->deadline_stated, std::string(request.request_id),
                std::string(request.key)};
  processes_[process].running[request.id] = {task, std::move(caller), 0};
  processes_[process].alone = task->retried;
  const Bytes body[] = {task->body};
  pool_.send(process, header_of(request), body);
}

// --- what processes say

HandlerTask* ServedHandler::task_of(std::size_t process, std::uint64_t id) {
  const auto found = processes_[process].running.find(id);
  return found == processes_[process].running.end() ? nullptr : found->second.task.get();
}

// The request is out of its process; nullptr: nobody waits for what came of it.
std::shared_ptr<HandlerTask> ServedHandler::finish(std::size_t process, std::uint64_t id) {
  Process& from = processes_[process];
  auto running = from.running.extract(id);
  if (!running) return nullptr;
  if (from.running.empty()) from.alone = false;
  pool_.proved(process);
  std::shared_ptr<HandlerTask> task = std::move(running.mapped().task);
  if (task) task->over = true;
  return task;
}

void ServedHandler::on(std::size_t process, HandlerAnswer& answer, const Frame& frame) {
  const auto task = finish(process, answer.id);
  if (task && task->streams) {
    const Error error{Code::model, "the handler answered what it had begun to stream"};
    task->ended(&error);
  } else if (task && frame.skipped) {
    task->failed({Code::model, "the handler's answer has " + std::to_string(frame.body_size) + " bytes, allowed " +
                                   std::to_string(settings_.most_body)});
  } else if (task) {
    task->answered(answer, frame.body);
  }
  dispatch();
}

void ServedHandler::on(std::size_t process, StreamStart& start, const Frame&) {
  HandlerTask* const task = task_of(process, start.id);
  if (!task || task->streams) return;
  task->streams = true;
  task->begun(start);
}

void ServedHandler::on(std::size_t process, StreamPart& part, const Frame& frame) {
  HandlerTask* const task = task_of(process, part.id);
  if (!task || !task->streams || frame.body_size == 0) return;
  const bool room = task->unread.size() < kWindowParts && task->unread_bytes < kWindowBytes;
  if (!room || frame.body_size > kLargestPart) {
    events_.noted("warning: a handler sends more of a stream than its client takes");
    return pool_.kill(process, "broken");
  }
  task->unread.push_back(frame.body.size());
  task->unread_bytes += frame.body.size();
  task->part(frame.body);
}

void ServedHandler::on(std::size_t process, StreamEnd& end, const Frame&) { end_stream(process, end.id, nullptr); }

void ServedHandler::on(std::size_t process, StreamBreak& end, const Frame&) {
  const Error error{Code::model, end.error};
  end_stream(process, end.id, &error);
}

void ServedHandler::end_stream(std::size_t process, std::uint64_t id, const Error* error) {
  const auto task = finish(process, id);
  if (task && task->streams) task->ended(error);
  if (task && !task->streams) task->failed({Code::model, "the handler ended without an answer"});
  dispatch();
}

void ServedHandler::taken(HandlerTask& task) {
  if (task.unread.empty()) return;
  task.unread_bytes -= task.unread.front();
  task.unread.pop_front();
  for (std::size_t i = 0; i < processes_.size(); ++i) {
    if (task_of(i, task.request.id) == &task) return pool_.send(i, more_header(task.request.id));
  }
}

// --- calls of models

void ServedHandler::on(std::size_t process, HandlerCall& call, const Frame& frame) {
  Process& from = processes_[process];
  const CallOrigin origin{process, from.epoch, call.id, call.call};
  const auto refuse = [&](unsigned status, std::string_view error) {
    pool_.send(process, failed_call(call.id, call.call, status, error));
  };
  const auto running = from.running.find(call.id);
  if (running == from.running.end()) return refuse(404, "this request is over");
  if (frame.skipped) return refuse(413, "the call's tensors have " + std::to_string(frame.body_size) + " bytes");
  if (from.calls.size() >= kMostCalls) return refuse(503, "too many calls of models at the same time");
  const auto [entry, added] = from.calls.try_emplace({call.id, call.call}, ModelCall{{}, frame.body.size()});
  if (!added) return refuse(400, "there is a call with this number already");
  from.held += frame.body.size();
  ++metrics_.calls;
  Cancel cancel = events_.called(origin, call, running->second.caller);
  const auto still = from.calls.find({call.id, call.call});
  if (still != from.calls.end()) still->second.cancel = std::move(cancel);
  if (from.held > kMostHeld) pool_.listen(process, false);
}

void ServedHandler::on(std::size_t process, HandlerUncall& call, const Frame&) {
  const CallOrigin origin{process, processes_[process].epoch, call.id, call.call};
  const auto found = processes_[process].calls.find({call.id, call.call});
  if (found == processes_[process].calls.end()) return;
  const Cancel cancel = std::move(found->second.cancel);
  end_call(origin);
  if (cancel) cancel();
}

// False if nobody waits for it.
bool ServedHandler::end_call(const CallOrigin& origin) {
  Process& from = processes_[origin.process];
  if (from.epoch != origin.epoch) return false;
  const auto call = from.calls.extract({origin.id, origin.call});
  if (!call) return false;
  const bool was_quiet = from.held > kMostHeld;
  from.held -= call.mapped().bytes;
  if (was_quiet && from.held <= kMostHeld) pool_.listen(origin.process, true);
  return true;
}

void ServedHandler::result(const CallOrigin& origin, std::string_view header, std::span<const Bytes> body) {
  if (end_call(origin)) pool_.send(origin.process, header, body);
}

void ServedHandler::refuse(const CallOrigin& origin, unsigned status, std::string_view error) {
  result(origin, failed_call(origin.id, origin.call, status, error), {});
}

// --- requests end

void ServedHandler::end(HandlerTask& task, const Error& error) {
  if (task.over) return;
  task.over = true;
  if (!leave_queue(task)) abandon(task);
  task.streams ? task.ended(&error) : task.failed(error);
}

void ServedHandler::cancel(HandlerTask& task) {
  if (task.over) return;
  task.over = true;
  if (!leave_queue(task)) abandon(task);
}

// It keeps its place until the process says that it is over there too.
void ServedHandler::abandon(const HandlerTask& task) {
  for (std::size_t i = 0; i < processes_.size(); ++i) {
    const auto found = processes_[i].running.find(task.request.id);
    if (found == processes_[i].running.end() || found->second.task.get() != &task) continue;
    found->second.over_ns = now_ns();
    found->second.task.reset();
    pool_.send(i, cancel_header(task.request.id));
    wake_at(found->second.over_ns + settings_.timeout_s * kSecond);
  }
}

void ServedHandler::died(std::size_t process) {
  Process& from = processes_[process];
  const Process lost = std::exchange(from, Process{from.epoch + 1, {}, {}, 0, false});
  for (const auto& [key, call] : lost.calls) {
    if (call.cancel) call.cancel();
  }
  for (const auto& [id, running] : lost.running) {
    const auto& task = running.task;
    if (!task) continue;
    if (task->streams || task->retried) {
      task->over = true;
      const Error error{Code::model, std::string("the handler's process ended while it ran this request") +
                                         (task->retried ? ", twice" : "")};
      task->streams ? task->ended(&error) : task->failed(error);
      continue;
    }
    task->retried = true;
    shares_.rejoin(task->client, 1);
    enqueue(task);
  }
  dispatch();
}

void ServedHandler::wake_at(std::int64_t at_ns) {
  if (timer_ns_ != 0 && timer_ns_ <= at_ns) return;
  timer_ns_ = at_ns;
  timer_.expires_at(std::chrono::steady_clock::time_point(std::chrono::nanoseconds(at_ns)));
  timer_.async_wait(guard_([this](boost::system::error_code ec) {
    if (!ec) on_timer();
  }));
}

void ServedHandler::on_timer() {
  timer_ns_ = 0;
  const std::int64_t now = now_ns();
  std::vector<std::shared_ptr<HandlerTask>> late;
  const auto look = [&](const std::shared_ptr<HandlerTask>& task) {
    task->deadline_ns <= now ? late.push_back(task) : wake_at(task->deadline_ns);
  };
  for (const auto& task : queue_) look(task);
  for (std::size_t i = 0; i < processes_.size(); ++i) {
    for (const auto& [id, running] : processes_[i].running) {
      if (running.task) {
        look(running.task);
      } else if (const std::int64_t last = running.over_ns + settings_.timeout_s * kSecond; last <= now) {
        pool_.kill(i, "stuck");
      } else {
        wake_at(last);
      }
    }
  }
  for (const auto& task : late)
    end(*task, too_late(task->request.id == 0 ? "in the handler's queue" : "in the handler"));
  dispatch();
}

// --- the end, and what is going on

void ServedHandler::drain() {
  draining_ = true;
  drain_pool();
}

// The processes end when there is nothing left for them to do.
void ServedHandler::drain_pool() {
  if (!draining_ || !quiet()) return;
  pool_.drain();
}

bool ServedHandler::quiet() const {
  return queue_.empty() &&
         std::ranges::all_of(processes_, [](const Process& process) { return process.running.empty(); });
}

bool ServedHandler::idle() const { return quiet() && (!draining_ || pool_.over()); }

Status ServedHandler::ready() const {
  if (!pool_.ready()) return Error{Code::unavailable, pool_.why_not()};
  return Done{};
}

HandlerGauges ServedHandler::gauges() const {
  HandlerGauges gauges;
  gauges.queued = static_cast<std::int64_t>(queue_.size());
  for (std::size_t i = 0; i < processes_.size(); ++i) {
    gauges.running += static_cast<std::int64_t>(processes_[i].running.size());
    ++(pool_.live(i) ? gauges.live : gauges.starting);
  }
  gauges.processes = pool_.pids();
  return gauges;
}

}  // namespace mctl
