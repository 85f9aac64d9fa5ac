#include "doors/line_writer.h"

#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>

namespace mctl {
namespace {

constexpr std::size_t kMostWaiting = 1 << 20;  // bytes
constexpr std::chrono::seconds kFarewell{1};

void write_all(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t count = ::write(fd, text.data(), text.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return;  // nobody reads any more
    text.remove_prefix(static_cast<std::size_t>(count));
  }
}

}  // namespace

struct LineWriter::State {
  std::mutex mutex;
  std::condition_variable came, went;
  std::string waiting;
  std::uint64_t dropped = 0;
  bool writing = false, over = false;

  bool take(std::string& text) {
    std::unique_lock lock(mutex);
    writing = false;
    went.notify_all();
    came.wait(lock, [this] { return over || !waiting.empty(); });
    text.clear();
    text.swap(waiting);
    if (dropped > 0) text += "{\"dropped\":" + std::to_string(dropped) + "}\n";
    dropped = 0;
    writing = !text.empty();
    return writing;
  }
};

LineWriter::LineWriter(int fd) : state_(std::make_shared<State>()) {
  std::thread([state = state_, fd] {
    for (std::string text; state->take(text);) write_all(fd, text);
  }).detach();
}

LineWriter::~LineWriter() {
  std::unique_lock lock(state_->mutex);
  state_->went.wait_for(lock, kFarewell, [this] { return state_->waiting.empty() && !state_->writing; });
  state_->over = true;
  state_->came.notify_all();
}

void LineWriter::write(std::string_view line) {
  const std::lock_guard lock(state_->mutex);
  if (state_->waiting.size() + line.size() >= kMostWaiting) {
    ++state_->dropped;
    return;
  }
  (state_->waiting += line) += '\n';
  state_->came.notify_one();
}

}  // namespace mctl
