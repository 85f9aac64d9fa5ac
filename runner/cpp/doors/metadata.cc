#include "doors/metadata.h"

#include <algorithm>
#include <boost/json.hpp>

namespace mctl {
namespace {

namespace json = boost::json;

constexpr std::size_t kMaxExample = 256;  // elements that an example spells out

json::array tensors(std::span<const Tensor> tensors) {
  json::array list;
  for (const Tensor& tensor : tensors) {
    json::array shape;
    for (const Expression& axis : tensor.shape) shape.push_back(axis.constant().value_or(-1));
    list.push_back({{"name", tensor.name}, {"datatype", oip_name_of(tensor.dtype)}, {"shape", std::move(shape)}});
  }
  return list;
}

// A number, or an expression over dims.
json::value end_of(const Expression& end) {
  const auto number = end.constant();
  return number ? json::value(*number) : json::value(end.text());
}

json::object properties(const Listed& model) {
  const Manifest& manifest = model.manifest;
  const Contract& contract = manifest.contract;
  json::object dims, ranges, signatures, buckets;
  for (const Dim& dim : contract.dims) {
    dims[dim.name] = {{"min", dim.min}, {"max", dim.max}, {"multiple", dim.multiple}};
  }
  for (const Tensor& input : contract.inputs) {
    signatures[input.name] = signature(input);
    if (input.range) ranges[input.name] = {end_of(input.range->low), end_of(input.range->high)};
  }
  for (const Tensor& output : contract.outputs) signatures[output.name] = signature(output);
  for (const auto& [dim, sizes] : manifest.buckets) buckets[dim] = json::array(sizes.begin(), sizes.end());
  json::object all{{"dims", std::move(dims)},
                   {"ranges", std::move(ranges)},
                   {"signatures", std::move(signatures)},
                   {"buckets", std::move(buckets)},
                   {"digest", manifest.digest}};
  if (contract.batch_dim) all["max_request_rows"] = model.max_request_rows;
  all["batch_dim"] = contract.batch_dim ? json::value(contract.dims[*contract.batch_dim].name) : json::value();
  return all;
}

json::value example_element(const Tensor& input, std::span<const std::int64_t> dims) {
  if (input.dtype == Dtype::boolean) return false;
  const auto [low, high] = limits_of(input, dims);
  return std::clamp<std::int64_t>(0, low, high);
}

std::string quoted(std::string_view text) {
  std::string out = "'";
  for (const char c : text) out += c == '\'' ? "'\\''" : std::string(1, c);
  return out + "'";
}

// A shell command that sends a request of the smallest sizes. Long data is made by the shell.
std::string example(const Listed& model, const std::string& url, bool token) {
  const Manifest& manifest = model.manifest;
  DimSizes smallest;
  for (const Dim& dim : manifest.contract.dims) smallest.push_back(dim.min);
  std::string before, body = "{\"inputs\":[";  // before: what the shell puts in front of the body's last part
  for (const Tensor& input : manifest.contract.inputs) {
    json::array shape;
    std::size_t count = 1;
    for (const Expression& axis : input.shape) {
      shape.push_back(axis.evaluate(smallest).value_or(1));
      count *= static_cast<std::size_t>(shape.back().as_int64());
    }
    if (body.back() == '}') body += ',';
    body += "{\"name\":" + json::serialize(json::value(input.name)) + ",\"datatype\":\"" +
            std::string(oip_name_of(input.dtype)) + "\",\"shape\":" + json::serialize(shape) + ",\"data\":";
    const json::value element = example_element(input, smallest);
    if (count <= kMaxExample) {
      body += json::serialize(json::array(count, element)) + "}";
    } else {
      before += "printf %s " + quoted(body + "[") + "; yes " + json::serialize(element) + " | head -n " +
                std::to_string(count) + " | paste -sd, -; ";
      body = "]}";
    }
  }
  body += "]}";
  std::string curl =
      "curl " + url + "/v2/models/" + std::string(model.name) + "/infer -H 'content-type: application/json'";
  if (token) curl += " -H \"authorization: Bearer $TOKEN\"";
  if (before.empty()) return curl + " -d " + quoted(body);
  return "{ " + before + "printf %s " + quoted(body) + "; } | " + curl + " -d @-";
}

}  // namespace

std::string server_metadata() {
  return R"({"name":"mctl","version":")" MCTL_VERSION R"(","extensions":["binary_tensor_data","statistics"]})";
}

std::string model_metadata(const Listed& model, std::span<const std::string> versions) {
  return json::serialize(json::value{{"name", model.name},
                                     {"versions", json::array(versions.begin(), versions.end())},
                                     {"platform", "torch_aoti"},
                                     {"inputs", tensors(model.manifest.contract.inputs)},
                                     {"outputs", tensors(model.manifest.contract.outputs)},
                                     {"properties", properties(model)}});
}

std::string front_page(std::span<const Listed> models, const std::string& url, bool token, bool as_json) {
  const std::string any = models.size() == 1 ? std::string(models.front().name) : "NAME";
  const std::string model = "/v2/models/" + any;
  std::vector<std::string> paths = {"GET /v2",
                                    "GET /v2/health/live",
                                    "GET /v2/health/ready",
                                    "GET " + model,
                                    "GET " + model + "/ready",
                                    "GET " + model + "/stats",
                                    "POST " + model + "/infer",
                                    "GET /metrics"};
  json::array names, examples;
  std::string text = "mctl " MCTL_VERSION " serves", curls;
  for (const Listed& served : models) {
    const std::string curl = example(served, url, token);
    ((text += names.empty() ? " " : ", ") += served.name) += " (version " + std::string(served.version) + ")";
    curls += "\n" + curl + "\n";
    names.emplace_back(served.name);
    examples.emplace_back(curl);
    for (const std::string& path : served.handler_paths)
      if (std::ranges::find(paths, path) == paths.end()) paths.push_back(path);
  }
  if (as_json) {
    return json::serialize(json::value{{"name", "mctl"},
                                       {"version", MCTL_VERSION},
                                       {"models", std::move(names)},
                                       {"paths", json::array(paths.begin(), paths.end())},
                                       {"example", examples.empty() ? json::value("") : examples.front()},
                                       {"examples", examples}});
  }
  text += "\n\n";
  for (const std::string& path : paths) text += path + '\n';
  return text + curls;
}

}  // namespace mctl
