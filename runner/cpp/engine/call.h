// One inference request on its way through the engine, whichever door it came in by.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "engine/shares.h"
#include "format/contract.h"
#include "format/result.h"

namespace mctl {

struct OutputView {
  std::vector<std::int64_t> shape;
  std::span<const std::byte> data;
};

// A door derives from it and keeps what `inputs` view.
struct Call {
  virtual ~Call() = default;
  // Exactly once, unless it is cancelled while it waits: `error`, or nullptr with `outputs`, which can be read until
  // this returns.
  virtual void finished(const Error* error) = 0;

  std::vector<std::span<const std::byte>> inputs;  // in the contract's order
  DimSizes dims;
  std::int64_t rows = 1, arrival_ns = 0, deadline_ns = 0;
  Client client = 0;
  bool deadline_stated = false;  // by the client; not the default
  bool cancelled = false;        // nobody waits for the answer

  std::vector<OutputView> outputs;
  std::int64_t queue_ns = 0, compute_ns = 0, batch_rows = 0;
  std::string bucket, variant;

  // The batcher's own.
  bool over = false;  // it was answered, or cancelled while it waited
  std::int64_t rows_left = 0;
  std::vector<std::vector<std::byte>> storage;  // of outputs that don't lie in one piece in a slot
};

}  // namespace mctl
