#include "doors/oip_answer.h"

#include <algorithm>

#include "format/elements.h"
#include "format/text.h"

namespace mctl {
namespace {

void append_shape(std::string& out, std::span<const std::int64_t> shape) {
  out += '[';
  for (std::size_t i = 0; i < shape.size(); ++i) {
    if (i) out += ',';
    out += std::to_string(shape[i]);
  }
  out += ']';
}

Status append_output(std::string& out, const Tensor& declared, const InferRequest::Output& wanted,
                     const OutputView& view) {
  out += "{\"name\":";
  append_json_string(out, wanted.name);
  out += ",\"datatype\":\"";
  out += oip_name_of(declared.dtype);
  out += "\",\"shape\":";
  append_shape(out, view.shape);
  if (wanted.binary) {
    out += ",\"parameters\":{\"binary_data_size\":" + std::to_string(view.data.size()) + "}}";
    return Done{};
  }
  out += ",\"data\":[";
  if (const auto bad = append_elements(out, declared.dtype, view.data)) {
    return Error{Code::unsayable, "output '" + wanted.name + "' holds NaN or Infinity (element " +
                                      std::to_string(*bad) + "), which JSON cannot say: ask for it with binary_data"};
  }
  out += "]}";
  return Done{};
}

}  // namespace

Result<Answer> answer_infer(std::string_view model, std::string_view version, const Contract& contract,
                            const InferRequest& request, std::span<const OutputView> outputs) {
  Answer answer;
  std::string& body = answer.body;
  std::size_t binary = 0;
  bool any_binary = false;
  for (const auto& wanted : request.outputs) {
    any_binary |= wanted.binary;
    if (wanted.binary) binary += outputs[wanted.index].data.size();
  }
  body.reserve(256 + binary);
  body += '{';
  if (request.id) {
    body += "\"id\":";
    append_json_string(body, *request.id);
    body += ',';
  }
  body += "\"model_name\":";
  append_json_string(body, model);
  body += ",\"model_version\":";
  append_json_string(body, version);
  body += ",\"outputs\":[";
  for (std::size_t i = 0; i < request.outputs.size(); ++i) {
    const auto& wanted = request.outputs[i];
    if (i) body += ',';
    const Tensor& declared = contract.outputs[wanted.index];
    if (auto done = append_output(body, declared, wanted, outputs[wanted.index]); !done) return done.error();
  }
  body += "]}";
  if (!any_binary) return answer;
  answer.type = "application/octet-stream";
  answer.fields = "Inference-Header-Content-Length: " + std::to_string(body.size()) + "\r\n";
  for (const auto& wanted : request.outputs) {
    const auto data = outputs[wanted.index].data;
    if (wanted.binary) body.append(reinterpret_cast<const char*>(data.data()), data.size());
  }
  return answer;
}

}  // namespace mctl
