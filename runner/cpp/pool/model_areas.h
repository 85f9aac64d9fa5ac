// How a model's tensors lie in the slots of an arena: an area for each input and each output of its contract.
#pragma once

#include <cstdint>
#include <optional>

#include "format/contract.h"
#include "format/result.h"
#include "pool/arena.h"

namespace mctl {

// With room for any sizes of the dims. `max_rows`: the most rows of the batch dim that a slot has to hold, if that is
// less than the contract's maximum. Code::host if they have more bytes than can be counted.
Result<Areas> model_areas(const Contract& contract, std::optional<std::int64_t> max_rows = std::nullopt);

// Makes sure that this side may touch a slot as far as tensors of these sizes reach. Code::host: there is no memory.
Status reserve(Arena& arena, int slot, const Contract& contract, const DimSizes& sizes);

}  // namespace mctl
