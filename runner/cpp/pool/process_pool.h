// The worker processes of one model and their lives: starts them, says what they are doing, replaces those that die or
// hang.
#pragma once

#include <sys/types.h>

#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "format/bundle_file.h"
#include "format/manifest.h"
#include "format/result.h"
#include "pool/arena.h"
#include "pool/backoff.h"
#include "pool/guard.h"
#include "pool/pool.h"
#include "pool/reaper.h"

namespace mctl {

struct WorkerSettings {
  std::size_t instances = 1;
  int bundle_fd = -1;
  std::string libtorch;
  std::int64_t threads = 1;
  bool verify = true, sandbox = true, strict = false, debuggable = false, quick = false;
  std::optional<std::int64_t> max_rows;  // of a batch, padding included
};

class ProcessPool final : public Pool {
 public:
  // What happens to workers, by their index.
  struct Events {
    std::function<void(std::size_t)> rang;                // slots of a live worker may have finished
    std::function<void(std::size_t)> died;                // its arena can still be read, until this returns
    std::function<void()> changed;                        // ready, or not
    std::function<void(const Error&)> hopeless;           // no worker can start; before the first was ready
    std::function<void(const std::string&)> noted;        // what a worker has to tell the operator
    std::function<void(std::span<const double>)> loaded;  // seconds: verify, load, warmup, golden
    std::function<void(const std::string&)> replaced;     // why: crash, stuck, load
    std::function<void(double cpu_seconds)> ended;        // a process of it
  };

  ProcessPool(boost::asio::io_context& io, Reaper& reaper, const Manifest& manifest, WorkerSettings settings);
  ~ProcessPool() override;

  Status start(Events events);
  std::size_t size() const override { return workers_.size(); }
  bool live(std::size_t worker) const override { return workers_[worker].live; }
  Arena& arena(std::size_t worker) override { return *workers_[worker].arena; }
  void ring(std::size_t worker) override;
  void proved(std::size_t worker) override;
  void kill(std::size_t worker, const std::string& reason) override;
  const Error* spoiled() override;
  std::optional<Error> away() const override;

  // All workers at first, then any.
  bool ready() const;
  std::string why_not() const;
  std::vector<pid_t> pids() const;
  // How long a batch may surely take: twice what all buckets took to warm up, at least a second. After a quick start,
  // or if a dim without buckets was at its smallest then, nobody knows.
  std::chrono::nanoseconds patience() const override { return patience_; }

 private:
  struct Worker {
    pid_t pid = -1;
    bool live = false;
    std::optional<Arena> arena;
    int wake_fd = -1;
    std::unique_ptr<boost::asio::posix::stream_descriptor> bell;  // the worker's end is its done_fd
    std::unique_ptr<boost::asio::steady_timer> restart;
    Backoff backoff;
    std::string reason;  // why it was killed, if it was
    Phase phase = Phase::starting;
  };

  Status spawn(std::size_t index);
  void note_failure(const Error& error);
  void note(const std::string& text);
  void listen(std::size_t index);
  void on_bell(std::size_t index);
  void on_phase(std::size_t index);
  void on_death(std::size_t index, int status);
  void restart_later(std::size_t index);
  void forget(Worker& worker);
  void give_up(const Error& why);

  boost::asio::io_context& io_;
  Reaper& reaper_;
  const Manifest& manifest_;
  const WorkerSettings settings_;
  BundleWatch watch_;
  Events events_;
  std::vector<Worker> workers_;
  bool was_ready_ = false, given_up_ = false;
  std::string last_error_;
  std::set<std::string> notes_;
  std::chrono::nanoseconds patience_ = std::chrono::seconds(1);
  const Guard guard_;
};

// The numbers that a worker's descriptors have.
constexpr int kBundleFd = 3, kArenaFd = 4, kWakeFd = 5, kDoneFd = 6;

}  // namespace mctl
