#include "registry/watch.h"

#include <boost/asio/post.hpp>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>

namespace mctl {

struct FolderWatch::State {
  State(boost::asio::io_context& loop, std::string path) : io(&loop), folder(std::move(path)) {}

  // A second went by, or somebody asks; false: it is over.
  bool wait() {
    std::unique_lock lock(mutex);
    came.wait_for(lock, std::chrono::seconds(1), [this] { return asked || io == nullptr; });
    asked = false;
    return io != nullptr;
  }

  void tell(Owned now) {
    const std::lock_guard lock(mutex);
    if (io != nullptr) boost::asio::post(*io, [this_one = changed, now = std::move(now)] { this_one(now); });
  }

  std::mutex mutex;
  std::condition_variable came;
  boost::asio::io_context* io;  // nullptr: it is over
  bool asked = false;
  Changed changed;
  Folder folder;  // the thread's alone, once it runs
  Owned last;
};

FolderWatch::FolderWatch(boost::asio::io_context& io, std::string folder)
    : state_(std::make_shared<State>(io, std::move(folder))) {}

FolderWatch::~FolderWatch() {
  const std::lock_guard lock(state_->mutex);
  state_->io = nullptr;
  state_->came.notify_one();
}

Result<Owned> FolderWatch::first_look() {
  auto owned = state_->folder.look();
  if (owned) state_->last = *owned;
  return owned;
}

void FolderWatch::start(Changed changed) {
  state_->changed = std::move(changed);
  std::thread([state = state_] {
    while (state->wait()) {
      auto now = state->folder.look();
      if (!now || *now == state->last) continue;  // a folder that cannot be read now has not changed
      state->last = *now;
      state->tell(*std::move(now));
    }
  }).detach();
}

void FolderWatch::look_now() {
  const std::lock_guard lock(state_->mutex);
  state_->asked = true;
  state_->came.notify_one();
}

}  // namespace mctl
