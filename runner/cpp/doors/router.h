// Paths to answers: the table of the serving contract. Inference itself is in infer.cc.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "doors/connection.h"
#include "doors/event_stream.h"
#include "doors/exposition.h"
#include "doors/handler_door.h"
#include "doors/management.h"
#include "doors/token.h"
#include "doors/torchserve.h"
#include "registry/fleet.h"

namespace mctl {

struct InferCall;

struct RouterSettings {
  std::size_t max_body = 64 << 20;               // bytes, inflated
  std::string token;                             // that clients have to send; empty: none
  std::function<void(const std::string&)> log;   // a line for each request; empty: none
  const Rollouts* rollouts = nullptr;            // of the fleet; where there is management
  std::optional<ManagementSettings> management;  // none: this listener has no management
};

class Router final : public Service {
 public:
  Router(Fleet& fleet, RouterSettings settings);

  void serve(const std::shared_ptr<Connection>& connection) override;
  std::optional<Answer> screen(const Connection& connection, bool large) override;
  bool knows(const Head& head) const override;
  bool probes(const Head& head) const override;
  Answer refuse(const Connection& connection, const Error& error) override;

  HandlerDoor& handlers() { return handlers_; }
  void drain();
  void set_url(std::string url) { url_ = std::move(url); }

 private:
  friend struct InferCall;
  using Path = std::span<const std::string>;  // the segments of a target

  // What a path says of a model: its name (or an alias), a version or label, and what comes after.
  struct Target {
    std::string name, version;
    std::vector<std::string> rest;
  };

  std::optional<Target> infers(const Head& head) const;
  Target target_of(Path path) const;
  void answer(Connection& connection, Answer answer) const;
  bool manages(const std::shared_ptr<Connection>& connection, Path path);
  bool listens(const std::shared_ptr<Connection>& connection, Path path);
  void dispatch(const std::shared_ptr<Connection>& connection);
  // A request to a model that has to be loaded first is dispatched when it is, or is known not to get so.
  struct Waiting;
  bool waits(const std::shared_ptr<Connection>& connection);
  std::optional<Target> asks(const Head& head) const;
  std::chrono::nanoseconds patience(const Head& head, const Target& target) const;
  Answer route(const Head& head, Path path) const;
  Answer model(const Head& head, Path path) const;
  Answer metadata(const ServedModel& model) const;
  Answer health() const;
  Answer page(const Head& head) const;
  Status permit(const Head& head) const;
  Status available() const;
  Status admits(const Target& target, Client client) const;
  std::vector<Counted> with_gauges() const;

  void infer(const std::shared_ptr<Connection>& connection, const Target& target);
  Status submit(const std::shared_ptr<InferCall>& call);
  Status read(InferCall& call);
  Status set_deadline(InferCall& call) const;
  void own(InferCall& call) const;
  Status hold(InferCall& call) const;
  bool gone(InferCall& call);
  void done(InferCall& call, const Error* error);

  Fleet& fleet_;
  const RouterSettings settings_;
  std::optional<Management> management_;
  EventStreams events_;
  std::optional<TorchServe> torchserve_;
  HandlerDoor handlers_;
  bool draining_ = false;
  std::string url_;
  std::uint64_t next_id_;
};

}  // namespace mctl
