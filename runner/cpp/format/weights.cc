#include "format/weights.h"

#include <algorithm>

#include "format/layout.h"
#include "format/text.h"

namespace mctl {

Result<Weights> Weights::map(const Archive& archive) {
  Weights weights;
  if (!archive.members().contains(kWeights)) return weights;
  auto mapping = archive.map(kWeights);
  if (!mapping) return mapping.error();
  weights.mapping_ = std::move(*mapping);
  auto tensors = read_tensors(weights.mapping_.bytes());
  if (!tensors) return damaged("member `" + std::string(kWeights) + "`: " + tensors.error().text);
  weights.tensors_ = std::move(*tensors);
  return weights;
}

Result<StoredTensor> Weights::tensor(const std::string& name, const ConstantRef& constant) {
  const auto found = tensors_.find(constant.tensor);
  if (found == tensors_.end()) return Error{Code::damaged, "the weights have no tensor `" + constant.tensor + "`"};
  StoredTensor tensor = found->second;
  if (!constant.state || tensor.data.empty()) return tensor;
  Copy& copy = state_[name];
  if (!copy.bytes) {
    const std::size_t rounded = (tensor.data.size() + kAlignment - 1) / kAlignment * kAlignment;
    copy.bytes.reset(static_cast<std::byte*>(std::aligned_alloc(kAlignment, rounded)));
    if (!copy.bytes) return Error{Code::host, "no memory for the model's state"};
    copy.first = tensor.data;
    std::copy(copy.first.begin(), copy.first.end(), copy.bytes.get());
  }
  tensor.data = {copy.bytes.get(), tensor.data.size()};
  return tensor;
}

void Weights::reset() {
  for (const auto& [name, copy] : state_) std::copy(copy.first.begin(), copy.first.end(), copy.bytes.get());
}

}  // namespace mctl
