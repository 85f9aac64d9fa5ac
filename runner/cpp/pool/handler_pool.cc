#include "pool/handler_pool.h"

#include <boost/asio/post.hpp>
#include <chrono>

#include "pool/ends.h"

namespace mctl {
namespace {

using namespace std::chrono_literals;
namespace asio = boost::asio;
using boost::system::error_code;

constexpr auto kLongestDrain = 10s;

}  // namespace

HandlerPool::HandlerPool(asio::io_context& io, Spawner& spawner, HandlerLaunch launch, std::string init,
                         std::size_t processes)
    : io_(io), spawner_(spawner), launch_(std::move(launch)), init_(std::move(init)), slots_(processes) {}

Status HandlerPool::start(Events events) {
  events_ = std::move(events);
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    if (auto started = spawn(i); !started) return started;
  }
  return Done{};
}

Status HandlerPool::spawn(std::size_t index) {
  Slot& slot = slots_[index];
  slot.failed = false;
  slot.process = std::make_unique<HandlerProcess>(io_, spawner_, launch_);
  HandlerProcess::Events events;
  events.said = [this, index](FromHandler& message, const Frame& frame) { on_said(index, message, frame); };
  events.logged = [this](const std::string& line) {
    last_line_ = line;
    events_.logged(line);
  };
  events.noted = [this](const std::string& text) { events_.noted(text); };
  events.ended = [this, index](int status, const std::string& why, double cpu_seconds) {
    events_.ended(cpu_seconds);
    on_end(index, status, why);
  };
  if (auto started = slot.process->start(std::move(events)); !started) {
    slot.process.reset();
    return started;
  }
  slot.process->send(init_);
  return Done{};
}

void HandlerPool::send(std::size_t index, std::string_view header, std::span<const Bytes> body) {
  if (slots_[index].process) slots_[index].process->send(header, body);
}

void HandlerPool::kill(std::size_t index, const std::string& why) {
  if (slots_[index].process) slots_[index].process->kill(why);
}

// --- what they say

void HandlerPool::on_said(std::size_t index, FromHandler& message, const Frame& frame) {
  if (auto* ready = std::get_if<HandlerReady>(&message)) return on_ready(index, *ready);
  if (const auto* failed = std::get_if<HandlerFailed>(&message)) return on_failed(index, *failed);
  if (slots_[index].live) events_.said(index, message, frame);
}

void HandlerPool::on_ready(std::size_t index, HandlerReady& ready) {
  Slot& slot = slots_[index];
  if (slot.live || draining_) return;
  slot.live = true;
  slot.backoff.ready();
  if (!was_ready_) routes_ = std::move(ready.routes);
  if (was_ready_) events_.noted("note: a handler is ready again");
  was_ready_ = was_ready_ || std::ranges::all_of(slots_, [](const Slot& each) { return each.live; });
  events_.changed();
}

void HandlerPool::on_failed(std::size_t index, const HandlerFailed& failed) {
  slots_[index].failed = true;
  last_error_ = failed.error;
  for (std::string_view rest = failed.trace; !rest.empty();) {
    const std::size_t end = std::min(rest.find('\n'), rest.size());
    events_.logged(std::string(rest.substr(0, end)));
    rest.remove_prefix(std::min(end + 1, rest.size()));
  }
}

// --- their ends

void HandlerPool::on_end(std::size_t index, int status, const std::string& why) {
  Slot& slot = slots_[index];
  const bool was_live = slot.live;
  slot.live = false;
  if (!was_live) slot.backoff.failed();
  if (was_live) events_.died(index);
  asio::post(io_, [gone = std::shared_ptr(std::move(slot.process))] {});  // it is what calls this
  if (draining_) return events_.changed();
  if (!slot.failed) {
    last_error_ = why == "stuck"    ? "a handler was stuck"
                  : why == "broken" ? "a handler did not keep to the protocol"
                  : status == -1    ? "the process that starts handlers ended"
                                    : "a handler ended by " + text_of_end(status);
    if (!was_live) last_error_ += " before it was ready";
    if (!was_live && !last_line_.empty()) last_error_ += ": " + last_line_;
  }
  if (!was_ready_) return events_.hopeless({Code::host, last_error_});
  events_.replaced(!why.empty() ? why : was_live ? "crash" : "load");
  if (given_up()) {
    events_.noted("error: the process that starts handlers ended: start the server anew");
  } else {
    restart_later(index);
  }
  events_.changed();
}

void HandlerPool::restart_later(std::size_t index) {
  Slot& slot = slots_[index];
  const auto pause = slot.backoff.next();
  events_.noted("warning: " + last_error_ + ", another one starts in " + std::to_string(pause.count()) + " ms");
  slot.restart = std::make_unique<asio::steady_timer>(io_, pause);
  slot.restart->async_wait(guard_([this, index](error_code ec) {
    if (ec || draining_) return;
    if (auto started = spawn(index); !started) {
      last_error_ = started.error().text;
      slots_[index].backoff.failed();
      restart_later(index);
      events_.changed();
    }
  }));
}

void HandlerPool::drain() {
  if (draining_) return;
  draining_ = true;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    slots_[i].restart.reset();
    slots_[i].live ? send(i, drain_header()) : kill(i, "drain");
  }
  patience_ = std::make_unique<asio::steady_timer>(io_, kLongestDrain);
  patience_->async_wait(guard_([this](error_code ec) {
    for (std::size_t i = 0; !ec && i < slots_.size(); ++i) kill(i, "drain");
  }));
}

// --- what is going on

bool HandlerPool::over() const {
  return std::ranges::none_of(slots_, [](const Slot& slot) { return slot.process != nullptr; });
}

bool HandlerPool::ready() const {
  return was_ready_ && std::ranges::any_of(slots_, [](const Slot& slot) { return slot.live; });
}

std::optional<Error> HandlerPool::away() const {
  const bool some = std::ranges::any_of(slots_, [](const Slot& slot) { return slot.live || slot.backoff.hopeful(); });
  if (was_ready_ && !given_up() && some) return std::nullopt;
  return Error{Code::unavailable, why_not()};
}

std::string HandlerPool::why_not() const {
  if (!was_ready_) return "loading: the handler is starting";
  return "no live handler: " + last_error_ + (given_up() ? "" : ", a new one is on its way");
}

std::vector<pid_t> HandlerPool::pids() const {
  std::vector<pid_t> pids;
  for (const Slot& slot : slots_) {
    if (slot.process && slot.process->pid() > 0) pids.push_back(slot.process->pid());
  }
  return pids;
}

}  // namespace mctl
