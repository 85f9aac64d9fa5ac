// An inference answer of the Open Inference Protocol.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "doors/http.h"
#include "doors/oip_request.h"
#include "engine/call.h"
#include "format/contract.h"
#include "format/result.h"

namespace mctl {

// The answer with the outputs that the request asks for; `outputs` are the contract's. Code::unsayable if JSON cannot
// say one of the values.
Result<Answer> answer_infer(std::string_view model, std::string_view version, const Contract& contract,
                            const InferRequest& request, std::span<const OutputView> outputs);

}  // namespace mctl
