#include "metadata.h"

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

json::object properties(const Manifest& manifest) {
  const Contract& contract = manifest.contract;
  json::object dims, ranges, signatures, buckets;
  for (const Dim& dim : contract.dims) {
    dims[dim.name] = {{"min", dim.min}, {"max", dim.max}, {"multiple", dim.multiple}};
  }
  for (const Tensor& input : contract.inputs) {
    signatures[input.name] = signature(input);
    if (input.range) ranges[input.name] = {input.range->first, input.range->second};
  }
  for (const Tensor& output : contract.outputs) signatures[output.name] = signature(output);
  for (const auto& [dim, sizes] : manifest.buckets) buckets[dim] = json::array(sizes.begin(), sizes.end());
  json::object all{{"dims", std::move(dims)},
                   {"ranges", std::move(ranges)},
                   {"signatures", std::move(signatures)},
                   {"buckets", std::move(buckets)},
                   {"digest", manifest.digest}};
  all["batch_dim"] = contract.batch_dim ? json::value(contract.dims[*contract.batch_dim].name) : json::value();
  return all;
}

json::value example_element(const Tensor& input) {
  if (input.dtype == Dtype::boolean) return false;
  return input.range ? std::clamp<std::int64_t>(0, input.range->first, input.range->second) : 0;
}

// A request of the smallest sizes; long data is left out.
std::string example(const Manifest& manifest) {
  DimSizes smallest;
  for (const Dim& dim : manifest.contract.dims) smallest.push_back(dim.min);
  json::array inputs;
  for (const Tensor& input : manifest.contract.inputs) {
    json::array shape;
    std::size_t count = 1;
    for (const Expression& axis : input.shape) {
      shape.push_back(axis.evaluate(smallest).value_or(1));
      count = std::min(kMaxExample + 1, count * static_cast<std::size_t>(shape.back().as_int64()));
    }
    json::array data{"…"};
    if (count <= kMaxExample) data = json::array(count, example_element(input));
    inputs.push_back({{"name", input.name},
                      {"datatype", oip_name_of(input.dtype)},
                      {"shape", std::move(shape)},
                      {"data", std::move(data)}});
  }
  return json::serialize(json::value{{"inputs", std::move(inputs)}});
}

}  // namespace

std::string server_metadata() {
  return R"({"name":"mctl","version":")" MCTL_VERSION R"(","extensions":["binary_tensor_data","statistics"]})";
}

std::string model_metadata(const Manifest& manifest) {
  return json::serialize(json::value{{"name", manifest.name},
                                     {"versions", json::array{manifest.version}},
                                     {"platform", "torch_aoti"},
                                     {"inputs", tensors(manifest.contract.inputs)},
                                     {"outputs", tensors(manifest.contract.outputs)},
                                     {"properties", properties(manifest)}});
}

std::string front_page(const Manifest& manifest, const std::string& url, bool as_json) {
  const std::string model = "/v2/models/" + manifest.name;
  const std::vector<std::string> paths = {"GET /v2",
                                          "GET /v2/health/live",
                                          "GET /v2/health/ready",
                                          "GET " + model,
                                          "GET " + model + "/ready",
                                          "GET " + model + "/stats",
                                          "POST " + model + "/infer",
                                          "GET /metrics"};
  const std::string curl =
      "curl " + url + model + "/infer -H 'content-type: application/json' -d '" + example(manifest) + "'";
  if (as_json) {
    return json::serialize(json::value{{"name", "mctl"},
                                       {"version", MCTL_VERSION},
                                       {"models", json::array{manifest.name}},
                                       {"paths", json::array(paths.begin(), paths.end())},
                                       {"example", curl}});
  }
  std::string text = "mctl " MCTL_VERSION " serves " + manifest.name + " (version " + manifest.version + ")\n\n";
  for (const std::string& path : paths) text += path + '\n';
  return text + "\n" + curl + "\n";
}

}  // namespace mctl
