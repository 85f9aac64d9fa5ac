// The management interface: mctl's own paths, and Triton's repository extension. TorchServe's is in torchserve.h.
//
// - `GET /admin/v1/state`: what is desired (state.h), with its ETag.
// - `PATCH /admin/v1/state`: a merge patch of it (change.h); `If-Match` refuses it if the state is another.
// - `GET /admin/v1/models`: what is in memory, on its way, or could not be loaded, and why.
// - `POST /admin/v1/models/M/rollback`: all requests back to the version before.
// - `GET /admin/v1/events`: what changed, why, by whom; `?after=ID`. In a stream, if the client takes one.
// - `POST /v2/repository/index`.
// - `POST /v2/repository/models/M/load`: waits until it can answer; a load that fails changes nothing.
// - `POST /v2/repository/models/M/unload`.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <string_view>

#include "doors/http.h"
#include "doors/load_request.h"
#include "registry/fleet.h"
#include "registry/rollouts.h"

namespace mctl {

struct ManagementRequest {
  const Head& head;
  std::span<const std::string> path;  // decoded segments
  std::string body;
};

class Management {
 public:
  using Reply = std::function<void(Answer)>;

  Management(Fleet& fleet, const Rollouts& rollouts, ManagementSettings settings)
      : fleet_(fleet), rollouts_(rollouts), settings_(std::move(settings)) {}

  // The last event that a client has seen: the header Last-Event-ID, or `after` in the target; 0: none.
  static Result<std::uint64_t> events_seen(std::string_view head, std::string_view target);
  // Whether a path is one of these, whatever its verb.
  static bool owns(std::span<const std::string> path);
  // Leads to one reply, now or later.
  void serve(const ManagementRequest& request, Reply reply);

 private:
  void state(const ManagementRequest& request, const Reply& reply);
  Answer changed(const ManagementRequest& request);
  Answer models() const;
  Answer rolled_back(const std::string& model);
  Answer events(const Head& head) const;
  void load(const std::string& model, const std::string& body, Reply reply);
  Answer unloaded(const std::string& model);

  Fleet& fleet_;
  const Rollouts& rollouts_;
  const ManagementSettings settings_;
};

// POST /v2/repository/index, on either listener. `only_ready`: the request's.
std::string repository_index(const Fleet& fleet, bool only_ready);

// Makes a change, waits until `version` can answer, and takes the change back if it cannot. `done` gets the reason.
void change_and_wait(Fleet& fleet, const std::string& model, const std::string& version,
                     const boost::json::value& patch, std::string by, std::function<void(const Status&)> done);

// The value of a field of a query; empty: it is not there.
std::string query_field(std::string_view target, std::string_view name);

}  // namespace mctl
