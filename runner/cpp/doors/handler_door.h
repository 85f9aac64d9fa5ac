// HTTP requests to handlers, their answers and streams, and the calls of models that handlers make.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "doors/connection.h"
#include "doors/handler_paths.h"
#include "engine/served_handler.h"
#include "engine/served_model.h"
#include "format/result.h"

namespace mctl {

struct HandlerExchange;

// Where a door finds models.
struct ModelFinder {
  // For one request: by version, else by its key or in turn.
  std::function<Result<std::shared_ptr<ServedModel>>(std::string_view name, std::string_view version,
                                                     std::string_view key)>
      choose;
  // To look at; nullptr: there is none.
  std::function<std::shared_ptr<ServedModel>(std::string_view name, std::string_view version)> look;
  std::function<std::vector<std::shared_ptr<ServedModel>>()> all;
};

class HandlerDoor {
 public:
  struct Settings {
    std::size_t max_body = 64 << 20;              // bytes, inflated
    bool has_token = false;                       // of the server: handlers do not see it
    std::function<void(const std::string&)> log;  // a line for each request; empty: none
  };
  HandlerDoor(ModelFinder models, Settings settings);

  // Is it for a handler, or would be if its model had one?
  bool concerns(const Head& head) const;
  // An answer, if it is refused by its head alone.
  std::optional<Answer> screen(const Connection& connection) const;
  // One that concerns it. `drains`: nothing new is begun.
  void serve(const std::shared_ptr<Connection>& connection, bool drains);

  // Code::usage: a model's routes cannot be, beside those of the others.
  Status check_routes(const ServedModel& model) const;
  // What ServedHandler::Events::called is for a model.
  ServedHandler::Cancel called(ServedModel& owner, const CallOrigin& origin, HandlerCall& call, const Caller& caller);

 private:
  friend struct HandlerExchange;
  using Models = std::vector<std::shared_ptr<ServedModel>>;

  // Whose request it is; `counts`: it is one of those that traffic is shared out by.
  Result<std::shared_ptr<ServedModel>> owner_of(const Connection& connection, bool counts) const;
  Result<std::shared_ptr<ServedModel>> named(const Connection& connection, HandlerPath path, bool counts) const;
  Result<std::shared_ptr<ServedModel>> by_route(const Connection& connection, std::span<const std::string> path,
                                                bool counts) const;
  Models with_route(std::span<const std::string> path) const;
  Status submit(const std::shared_ptr<HandlerExchange>& exchange);
  Status read(HandlerExchange& exchange) const;
  void respond(HandlerExchange& exchange, Answer answer, Outcome outcome) const;
  void close_books(HandlerExchange& exchange, unsigned status, Outcome outcome) const;

  const ModelFinder models_;
  const Settings settings_;
  std::uint64_t next_id_;
};

}  // namespace mctl
