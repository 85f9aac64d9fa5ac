#include "doors/shadow.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "model/compare.h"

namespace mctl {
namespace {

constexpr Client kShadow = ~Client{0};  // in the shadow's queue all of them are one client
constexpr std::size_t kKept = 5;        // ids of requests that differed last

struct Wanted {
  std::string name;
  Dtype dtype;
  std::vector<std::int64_t> shape;
  std::vector<std::byte> data;
};

struct ShadowCall final : Call {
  explicit ShadowCall(std::shared_ptr<ServedModel> on) : model(std::move(on)) {}
  void finished(const Error* error) override {
    Shadowed& counted = model->metrics().shadowed;
    if (error != nullptr && error->code != Code::model) return void(++counted.dropped);
    count(error != nullptr ? error->text : differing());
  }

  // `what` differs; empty: nothing does.
  void count(const std::string& what) {
    Shadowed& counted = model->metrics().shadowed;
    ++counted.compared;
    if (what.empty()) return;
    ++counted.differed;
    counted.last = what;
    counted.ids.push_back(id);
    if (counted.ids.size() > kKept) counted.ids.erase(counted.ids.begin());
  }

  std::string differing() const {
    const Contract& contract = model->contract();
    for (const Wanted& one : wanted) {
      const auto found = std::ranges::find(contract.outputs, one.name, &Tensor::name);
      if (found == contract.outputs.end()) return "there is no output '" + one.name + "'";
      const OutputView& got = outputs[static_cast<std::size_t>(found - contract.outputs.begin())];
      if (found->dtype != one.dtype || got.shape != one.shape)
        return "output '" + one.name + "' has another dtype or shape";
      const auto& tolerances = model->manifest().tolerances;
      const auto tolerance = tolerances.find(one.name);
      const std::string what =
          difference(one.dtype, got.data, one.data, tolerance != tolerances.end() ? tolerance->second : Tolerance{});
      if (!what.empty()) return "output '" + one.name + "': " + what;
    }
    return {};
  }

  const std::shared_ptr<ServedModel> model;
  std::string id;
  std::vector<InferRequest::Input> request;
  std::vector<Wanted> wanted;
};

void keep_inputs(ShadowCall& call, const InferRequest& request) {
  for (const auto& input : request.inputs) {
    auto& kept = call.request.emplace_back();
    kept.name = input.name;
    kept.dtype = input.dtype;
    kept.shape = input.shape;
    kept.parsed.assign(input.data.begin(), input.data.end());
  }
}

void keep_outputs(ShadowCall& call, const Contract& contract, std::span<const OutputView> outputs) {
  for (std::size_t i = 0; i < outputs.size(); ++i)
    call.wanted.push_back({contract.outputs[i].name,
                           contract.outputs[i].dtype,
                           outputs[i].shape,
                           {outputs[i].data.begin(), outputs[i].data.end()}});
}

}  // namespace

void shadow(ServedModel& shadow, const ServedModel& answered, const InferRequest& request,
            std::span<const OutputView> outputs, std::string id) {
  Shadowed& counted = shadow.metrics().shadowed;
  if (!shadow.admit(kShadow, 1)) return void(++counted.dropped);
  auto call = std::make_shared<ShadowCall>(shadow.shared_from_this());
  call->id = std::move(id);
  call->client = kShadow;
  call->arrival_ns = now_ns();
  call->deadline_ns = call->arrival_ns + shadow.default_timeout_ns();
  keep_inputs(*call, request);
  keep_outputs(*call, answered.contract(), outputs);
  std::vector<Given> given;
  for (const auto& input : call->request) given.push_back({input.name, input.dtype, input.shape, input.parsed});
  if (auto bound = shadow.bind(*call, given); !bound) return call->count(bound.error().text);
  if (!shadow.submit(call)) ++counted.dropped;
}

}  // namespace mctl
