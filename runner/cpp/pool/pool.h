// What a batcher sees of the workers of a model. ProcessPool is the one that serves; tests have one without processes.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <optional>
#include <string>

#include "format/result.h"
#include "pool/arena.h"

namespace mctl {

class Pool {
 public:
  virtual ~Pool() = default;
  virtual std::size_t size() const = 0;
  virtual bool live(std::size_t worker) const = 0;
  virtual Arena& arena(std::size_t worker) = 0;  // of a worker that is live, or just died
  virtual void ring(std::size_t worker) = 0;     // a slot of its arena is ready
  virtual void proved(std::size_t worker) = 0;   // it finished a batch: restarts no longer back off
  virtual void kill(std::size_t worker, const std::string& why) = 0;  // it will die
  virtual const Error* spoiled() = 0;  // why nothing that workers say holds any more, for good; null: it holds
  // Why what waits is refused: no worker lives, and none is likely to come back soon. nullopt: one does, or is.
  virtual std::optional<Error> away() const = 0;
  // How long a batch may surely take, however large.
  virtual std::chrono::nanoseconds patience() const = 0;
};

}  // namespace mctl
