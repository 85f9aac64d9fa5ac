// Paths to answers: the table of the serving contract, for one model. Inference itself is in infer.cc.
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
#include "doors/token.h"
#include "engine/batcher.h"
#include "engine/metrics.h"
#include "engine/packing.h"
#include "format/manifest.h"
#include "pool/supervisor.h"

namespace mctl {

struct InferCall;

struct RouterSettings {
  std::int64_t max_request_rows = 1;
  std::chrono::nanoseconds default_timeout{30'000'000'000};
  std::size_t max_body = 64 << 20;              // bytes, inflated
  std::string token;                            // that clients have to send; empty: none
  std::function<void(const std::string&)> log;  // a line for each request; empty: none
};

class Router final : public Service {
 public:
  // Without batcher and supervisor it is the null mode: zeros of the right shape, no model.
  Router(const Manifest& manifest, RouterSettings settings, Packing& packing, Metrics& metrics, Supervisor* supervisor,
         Batcher* batcher);

  void serve(const std::shared_ptr<Connection>& connection) override;
  bool gone(Connection& connection) override;
  Status screen(const Connection& connection) override;
  Answer refuse(const Connection& connection, const Error& error) override;

  void drain() { draining_ = true; }
  void set_url(std::string url) { url_ = std::move(url); }

 private:
  friend struct InferCall;
  using Path = std::span<const std::string>;  // the segments of a target

  bool infers(const Head& head, Path path) const;
  std::optional<Answer> refuse_model(Path path) const;
  Answer route(const Head& head, Path path) const;
  Answer model(const Head& head, Path path) const;
  Answer health() const;
  Answer page(const Head& head) const;
  Status permit(const Head& head) const;
  Status available() const;
  Gauges gauges() const;

  void infer(const std::shared_ptr<Connection>& connection);
  Status submit(const std::shared_ptr<InferCall>& call);
  Status room(const Connection& connection) const;
  Status read(InferCall& call);
  Status bind(InferCall& call);
  void answer_zeros(InferCall& call);
  void done(InferCall& call, const Error* error);

  const Manifest& manifest_;
  const RouterSettings settings_;
  Packing& packing_;
  Metrics& metrics_;
  Supervisor* supervisor_;
  Batcher* batcher_;
  bool draining_ = false;
  std::string url_;
  const std::string infer_path_, metadata_;  // metadata: the body of GET /v2/models/M
  std::uint64_t next_id_;
  std::vector<std::byte> zeros_;
};

}  // namespace mctl
