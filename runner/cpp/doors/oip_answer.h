// An inference answer of the Open Inference Protocol.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "doors/http.h"
#include "doors/oip_request.h"
#include "format/contract.h"
#include "format/manifest.h"
#include "format/result.h"

namespace mctl {

struct OutputView {
  std::vector<std::int64_t> shape;
  std::span<const std::byte> data;
};

// The answer with the outputs that the request asks for; `outputs` are the contract's. Code::model if JSON cannot say
// one of the values.
Result<Answer> answer_infer(const Manifest& manifest, const InferRequest& request, std::span<const OutputView> outputs);

}  // namespace mctl
