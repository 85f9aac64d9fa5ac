// Shadowing: a request that one version has answered is run on another one too, and the outputs are compared.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "doors/oip_request.h"
#include "engine/call.h"
#include "engine/served_model.h"

namespace mctl {

// After the answer was sent. It is dropped if the shadow's queue is full; what came of it is counted in its metrics.
// `outputs` are those of `answered`, in its contract's order; they need not live on.
void shadow(ServedModel& shadow, const ServedModel& answered, const InferRequest& request,
            std::span<const OutputView> outputs, std::string id);

}  // namespace mctl
