// Tensors as plain JSON: `{"x": [[1, 2]], "mask": [[true, false]]}`, for those who have no client of the protocol.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

#include "doors/http.h"
#include "engine/call.h"
#include "format/contract.h"
#include "format/result.h"

namespace mctl {

// The same as the body of an inference request: shapes are those of the nested lists, dtypes the contract's. A body
// that is one already (`inputs`) stays as it is. Code::invalid if it is no JSON object; what stands in it is not looked
// at.
Result<std::string> infer_body_from(const Contract& contract, std::string_view body);

// Outputs by name, nested as they are shaped. Code::unsayable if JSON cannot say one of the values.
Result<Answer> answer_by_name(const Contract& contract, std::span<const OutputView> outputs);

}  // namespace mctl
