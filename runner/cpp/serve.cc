#include "serve.h"

#include <malloc.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <boost/asio/io_context.hpp>
#include <boost/asio/signal_set.hpp>
#include <boost/asio/steady_timer.hpp>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <new>
#include <optional>
#include <thread>

#include "doors/line_writer.h"
#include "doors/router.h"
#include "doors/server.h"
#include "doors/token.h"
#include "format/archive.h"
#include "format/descriptor.h"
#include "pool/memory.h"
#include "pool/reaper.h"
#include "pool/sandbox.h"
#include "pool/spawner.h"
#include "registry/fleet.h"
#include "registry/rollouts.h"
#include "registry/sources.h"
#include "registry/store.h"
#include "registry/watch.h"

namespace mctl {
namespace {

using namespace std::chrono_literals;
namespace asio = boost::asio;
using Say = std::function<void(const std::string&)>;

constexpr int kSecondSignal = 130;
constexpr std::int64_t kLeastHandled = 64;    // MiB that a handler's answer may have in any case
constexpr std::size_t kOperators = 64;        // connections to the management port
constexpr int kMapped = 1 << 20;              // bytes
constexpr std::size_t kLeastHeld = 32 << 20;  // bytes that clients may make it hold in any case

std::size_t held_allowed(const ServeOptions& options) {
  if (options.max_clients_mb) return static_cast<std::size_t>(*options.max_clients_mb) << 20;
  return std::max(memory_allowed() / 4, kLeastHeld);
}

HttpLimits http_limits(const ServeOptions& options) {
  HttpLimits limits;
  limits.max_body = static_cast<std::size_t>(options.max_body_mb) << 20;
  limits.max_header = static_cast<std::size_t>(options.max_header_kb) << 10;
  limits.max_connections = static_cast<std::size_t>(options.max_connections);
  limits.idle = std::chrono::seconds(options.idle_timeout);
  limits.max_held = held_allowed(options);
  return limits;
}

Owner owner_of(const ServeOptions& options) {
  if (!options.config_file.empty()) return Owner::file;
  const bool folder = options.bundles.size() == 1 && std::filesystem::is_directory(options.bundles.front());
  return folder ? Owner::folder : Owner::state;
}

constexpr std::int64_t kMaybeLoaded = 16;  // versions that a folder, a file or a state may have at a time

// What is open beside connections, with room for those that are turned away and for a worker that starts again.
std::int64_t descriptors_of_its_own(const ServeOptions& options) {
  const bool fixed = owner_of(options) == Owner::state && options.state_file.empty() && !options.admin_port;
  const auto given = static_cast<std::int64_t>(options.bundles.size());
  return 96 + 8 * options.instances * (fixed ? given : std::max(given, kMaybeLoaded));
}

// mctl's own handlers, which bundles name, need no permission.
bool names_stock_handler(const std::string& bundle) {
  const Descriptor file(open_to_read(bundle));
  if (!file) return false;
  const auto archive = Archive::open(file.get());
  if (!archive) return false;
  const auto manifest = read_manifest(*archive);
  return manifest && manifest->handler && manifest->handler->is_stock();
}

bool runs_handlers(const ServeOptions& options) {
  return !options.handlers.empty() || options.allow_handler ||
         std::ranges::any_of(options.bundles, names_stock_handler);
}

// As many connections at a time as there are descriptors for.
Result<std::int64_t> connections_allowed(const ServeOptions& options) {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return options.max_connections;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
  const auto most = static_cast<std::int64_t>(std::min<rlim_t>(limit.rlim_max, INT32_MAX));
  const std::int64_t own = descriptors_of_its_own(options);
  if (most <= own)
    return Error{Code::host, "only " + std::to_string(most) + " descriptors may be open, more than " +
                                 std::to_string(own) + " are needed: raise the limit (`ulimit -n`)"};
  return std::min(options.max_connections, most - own);
}

// Seats take a quarter of what clients may hold, and one client's largest body half of the rest.
void fit_to_memory(ServeOptions& options, const Say& say) {
  const std::size_t held = held_allowed(options);
  const auto connections = static_cast<std::int64_t>(held / 4 / kSeatBytes);
  if (connections < options.max_connections) {
    options.max_connections = connections;
    say("warning: at most " + std::to_string(connections) + " connections at a time, by `--max-clients-mb`");
  }
  const auto body = static_cast<std::int64_t>((held - held / 4) / 2 >> 20) - 1;
  if (body < options.max_body_mb) {
    options.max_body_mb = body;
    say("warning: bodies have at most " + std::to_string(body) + " MiB, by `--max-clients-mb`");
  }
}

// A client that has just had an answer may be sending its next request: it gets one too, and is told to go.
constexpr int kQuietPolls = 10;

// All parts of the front, and the order in which they come and go.
class Front {
 public:
  // `spawner`: the process that starts handlers, if there is one.
  Front(const ServeOptions& options, Token token, Token admin_token, SpawnerProcess spawner, const Say& say);
  Status prepare();
  Result<int> run();

 private:
  Result<Owned> owned();
  Status check_handlers() const;
  bool may_change() const;
  void start_models();
  void read_again();
  void await_signal();
  void await_hangup();
  void drain();
  void poll_drained();
  void end(Result<int> result);

  void run_loop();
  void limit_hosts();
  Status listen_for_operators();
  void confine_itself() const;
  void say_who_can_use_it() const;

  const ServeOptions& options_;
  const Token token_;
  const Say& say_;
  asio::io_context io_{1};
  asio::signal_set signals_{io_, SIGTERM, SIGINT}, hangup_{io_};
  asio::steady_timer timer_{io_};
  std::chrono::steady_clock::time_point exit_at_;
  Reaper reaper_{io_};
  std::unique_ptr<Spawner> spawner_;
  Fleet fleet_;
  Rollouts rollouts_{io_, fleet_};
  std::optional<FolderWatch> folder_;
  const Token admin_token_;
  Router router_, admin_router_;
  Server server_, admin_server_;
  bool draining_ = false;
  int quiet_polls_ = 0;
  Result<int> result_ = 0;
};

RouterSettings router_settings(const ServeOptions& options, const Token& token, const Say& say) {
  RouterSettings settings;
  settings.max_body = static_cast<std::size_t>(options.max_body_mb) << 20;
  settings.token = token.text;
  if (options.log_requests) settings.log = say;
  return settings;
}

FleetSettings fleet_settings(const ServeOptions& options, Spawner* spawner) {
  FleetSettings settings{
      options, options, options.null, owner_of(options), options.ready == "all", options.max_resident};
  settings.runtime.spawner = spawner;
  return settings;
}

RouterSettings admin_router_settings(const ServeOptions& options, const Rollouts& rollouts, const Token& token,
                                     const Say& say) {
  RouterSettings settings = router_settings(options, token, say);
  settings.rollouts = &rollouts;
  settings.management = ManagementSettings{options.model_store, options.store};
  return settings;
}

HttpLimits admin_limits(const ServeOptions& options) {
  HttpLimits limits = http_limits(options);
  limits.max_body = std::max(limits.max_body, static_cast<std::size_t>(options.max_load_mb) << 20);
  limits.max_held = std::max(limits.max_held, 3 * limits.max_body);
  limits.max_connections = kOperators;
  return limits;
}

Front::Front(const ServeOptions& options, Token token, Token admin_token, SpawnerProcess spawner, const Say& say)
    : options_(options),
      token_(std::move(token)),
      say_(say),
      spawner_(spawner.control ? std::make_unique<Spawner>(io_, std::move(spawner)) : nullptr),
      fleet_(io_, reaper_, fleet_settings(options, spawner_.get()), say),
      admin_token_(std::move(admin_token)),
      router_(fleet_, router_settings(options, token_, say)),
      admin_router_(fleet_, admin_router_settings(options, rollouts_, admin_token_, say)),
      server_(io_, http_limits(options), router_),
      admin_server_(io_, admin_limits(options), admin_router_) {}

Result<Owned> Front::owned() {
  if (fleet_.owner() == Owner::file) return owned_by_file(options_.config_file);
  if (fleet_.owner() == Owner::state) return owned_by_bundles(options_.bundles);
  folder_.emplace(io_, options_.bundles.front());
  return folder_->first_look();
}

Status Front::prepare() {
  if (!options_.config_file.empty() && !options_.bundles.empty()) {
    return Error{Code::usage, "`--config` says what is served: give no bundle beside it"};
  }
  std::optional<StateStore> store;
  if (!options_.state_file.empty()) {
    auto opened = StateStore::open(options_.state_file);
    if (!opened) return opened.error();
    store.emplace(*std::move(opened));
  }
  auto now = owned();
  if (!now) return now.error();
  if (auto prepared = fleet_.prepare(*std::move(now), std::move(store)); !prepared) return prepared;
  return check_handlers();
}

// Each handler has a model, which is served, unless others may come.
Status Front::check_handlers() const {
  const auto& models = fleet_.desired().models;
  const bool all_named = !may_change();
  for (const std::string& text : options_.handlers) {
    const auto [name, handler] = split_handler(text);
    const auto usage = [](std::string why) { return Error{Code::usage, std::move(why)}; };
    if (name.empty() && (options_.handlers.size() > 1 || models.size() > 1)) {
      return usage("whose handler is `" + text + "`? Write `--handler MODEL=" + std::string(handler) + "`");
    }
    if (!name.empty() && all_named && !models.contains(std::string(name))) {
      return usage("`--handler " + text + "` is for a model that is not served");
    }
    if (!handler.starts_with("stock:") && access(std::string(handler).c_str(), R_OK) != 0) {
      return usage("cannot read the handler `" + std::string(handler) + "`: " + std::strerror(errno));
    }
  }
  return Done{};
}

Result<int> Front::run() {
  if (auto listening = server_.listen(options_.host, static_cast<std::uint16_t>(options_.port)); !listening) {
    return listening.error();
  }
  router_.set_url(server_.url());
  limit_hosts();
  say_("listening on " + server_.url());
  say_who_can_use_it();
  if (auto managed = listen_for_operators(); !managed) return managed.error();
  await_signal();
  if (fleet_.owner() != Owner::state) {
    boost::system::error_code ignored;  // of a signal that exists
    hangup_.add(SIGHUP, ignored);
    await_hangup();
  }
  confine_itself();
  start_models();
  run_loop();
  return result_;
}

// Memory that cannot be had is no reason to end: it is the misfortune of whoever needed it.
void Front::run_loop() {
  for (;;) {
    try {
      server_.go_on();
      io_.run();
      return;
    } catch (const std::bad_alloc&) {
      std::this_thread::sleep_for(1ms);
    }
  }
}

// Browsers of this machine reach a loopback address too: without a token the name in a request is what tells them
// apart.
void Front::limit_hosts() {
  if (!options_.allowed_hosts.empty()) return server_.allow_only(Hosts::from_option(options_.allowed_hosts));
  if (server_.on_loopback() && token_.text.empty()) server_.allow_only(Hosts::of_loopback(options_.host));
}

Status Front::listen_for_operators() {
  if (!options_.admin_port) return Done{};
  const auto port = static_cast<std::uint16_t>(*options_.admin_port);
  if (auto listening = admin_server_.listen(options_.admin_host, port); !listening) return listening;
  admin_router_.set_url(admin_server_.url());
  say_("management on " + admin_server_.url());
  if (!options_.allowed_hosts.empty()) {
    admin_server_.allow_only(Hosts::from_option(options_.allowed_hosts));
  } else if (admin_server_.on_loopback() && admin_token_.text.empty()) {
    admin_server_.allow_only(Hosts::of_loopback(options_.admin_host));
  }
  if (!admin_server_.on_loopback() && admin_token_.text.empty()) {
    say_("warning: everyone who can reach the management address can change what is served");
  }
  if (admin_token_.exposed) say_("warning: everyone on this machine can read `" + options_.admin_token_file + "`");
  return Done{};
}

// Where that fails it fails in the workers too, and they tell.
void Front::confine_itself() const {
  if (!options_.sandbox) return;
  if (!options_.debuggable) hide_memory();
  static_cast<void>(static_cast<bool>(confine(Stage::front, {})));
}

void Front::say_who_can_use_it() const {
  const bool loopback = server_.on_loopback();
  if (!loopback && token_.text.empty()) say_("warning: everyone who can reach this address can use the server");
  if (!loopback && !token_.text.empty()) {
    say_("warning: this address is protected by a token, but not encrypted: put TLS in front of it");
  }
  if (token_.exposed) say_("warning: everyone on this machine can read `" + options_.token_file + "`");
}

// Bundles on the command line are all there will ever be, unless there is somebody who may change that.
bool Front::may_change() const {
  return fleet_.owner() != Owner::state || !options_.state_file.empty() || options_.admin_port;
}

// Without that, the server ends if none can be served.
void Front::start_models() {
  HandlerDoor& door = router_.handlers();
  fleet_.direct_handlers({[&door](const ServedModel& model) { return door.check_routes(model); },
                          [&door](ServedModel& model, const CallOrigin& origin, HandlerCall& call,
                                  const Caller& caller) { return door.called(model, origin, call, caller); }});
  fleet_.begin(may_change() ? nullptr : std::function([this](const Error& error) { end(error); }));
  rollouts_.begin();
  if (folder_) folder_->start([this](Owned now) { fleet_.adopt(std::move(now)); });
}

// SIGHUP, where there is something to look at: what could not be loaded is tried again.
void Front::read_again() {
  fleet_.forget_failures();
  if (folder_) return folder_->look_now();
  if (fleet_.owner() != Owner::file) return;
  auto now = owned();
  now ? fleet_.adopt(*std::move(now)) : say_("warning: nothing has changed: " + now.error().text);
}

void Front::await_hangup() {
  hangup_.async_wait([this](boost::system::error_code ec, int) {
    if (ec) return;
    read_again();
    await_hangup();
  });
}

void Front::await_signal() {
  signals_.async_wait([this](boost::system::error_code ec, int) {
    if (ec) return;
    if (draining_) return end(kSecondSignal);
    drain();
    await_signal();
  });
}

void Front::drain() {
  draining_ = true;
  say_("draining");
  exit_at_ = std::chrono::steady_clock::now() + std::chrono::seconds(options_.exit_timeout);
  for (Router* router : {&router_, &admin_router_}) router->drain();
  for (Server* server : {&server_, &admin_server_}) server->drain();
  fleet_.drain();
  poll_drained();
}

void Front::poll_drained() {
  const bool quiet = fleet_.idle() && server_.quiet() && admin_server_.quiet();
  quiet_polls_ = quiet ? quiet_polls_ + 1 : 0;
  if (quiet_polls_ == kQuietPolls) return end(0);
  if (std::chrono::steady_clock::now() >= exit_at_) {
    return end(Error{Code::unavailable, "requests were not answered within `--exit-timeout`"});
  }
  timer_.expires_after(5ms);
  timer_.async_wait([this](boost::system::error_code ec) {
    if (!ec) poll_drained();
  });
}

void Front::end(Result<int> result) {
  result_ = std::move(result);
  io_.stop();
}

}  // namespace

Result<int> serve(const ServeOptions& given, const Say& say) {
  mallopt(M_MMAP_THRESHOLD, kMapped);  // large memory goes back when it is free, whatever lies beside it
  signal(SIGPIPE, SIG_IGN);
  signal(SIGXFSZ, SIG_IGN);
  ServeOptions options = given;
  if (access("/proc/self/exe", R_OK) != 0) return Error{Code::host, "`/proc` is not there: mount it"};
  const auto connections = connections_allowed(options);
  if (!connections) return connections.error();
  if (*connections < options.max_connections) {
    options.max_connections = *connections;
    say("warning: at most " + std::to_string(*connections) + " connections at a time, by the limit of descriptors");
  }
  fit_to_memory(options, say);
  Result<Token> token = Token{};
  if (!options.token_file.empty()) token = read_token(options.token_file);
  if (!token) return token.error();
  Result<Token> admin_token = Token{};
  if (!options.admin_token_file.empty()) admin_token = read_token(options.admin_token_file);
  if (!admin_token) return admin_token.error();
  std::optional<LineWriter> log;
  SpawnerProcess spawner;
  const bool handles = runs_handlers(options);
  if (handles) {  // first of all: there is one thread yet
    auto forked = fork_spawner();
    if (!forked) return forked.error();
    spawner = *std::move(forked);
  }
  options.handler_most_body = static_cast<std::size_t>(std::max(kLeastHandled, options.max_body_mb)) << 20;
  Say say_all = say;
  if (options.log_requests || handles) {  // so much is said that whoever reads it may be too slow
    log.emplace(STDERR_FILENO);
    say_all = [&](const std::string& line) { log->write(line); };
  }
  Front front(options, *std::move(token), *std::move(admin_token), std::move(spawner), say_all);
  if (auto prepared = front.prepare(); !prepared) return prepared.error();
  return front.run();
}

}  // namespace mctl
