#include "model/aoti.h"

#include <unistd.h>

#include <algorithm>

#include "model/code.h"
#include "model/dl.h"
#include "model/tensor_copy.h"

namespace mctl {
namespace {

Error host(std::string text) { return {Code::host, std::move(text)}; }
Error damaged(std::string text) { return {Code::damaged, std::move(text)}; }

// Strides of row-major order.
std::vector<std::int64_t> row_major(std::span<const std::int64_t> sizes) {
  std::vector<std::int64_t> strides(sizes.size());
  std::int64_t step = 1;
  for (std::size_t axis = sizes.size(); axis-- > 0; step *= std::max<std::int64_t>(sizes[axis], 1))
    strides[axis] = step;
  return strides;
}

// Does each element that the strides reach lie within `count` elements?
bool fits(std::span<const std::int64_t> sizes, std::span<const std::int64_t> strides, std::int64_t count) {
  if (sizes.size() != strides.size()) return false;
  std::int64_t last = 0;
  for (std::size_t axis = 0; axis < sizes.size(); ++axis) {
    std::int64_t reach;
    if (sizes[axis] == 0) return true;
    if (strides[axis] < 0 || __builtin_mul_overflow(sizes[axis] - 1, strides[axis], &reach) ||
        __builtin_add_overflow(last, reach, &last))
      return false;
  }
  return last < count;
}

std::string described(std::string_view dtype, std::span<const std::int64_t> shape) {
  std::string text(dtype);
  for (std::size_t axis = 0; axis < shape.size(); ++axis) text += (axis == 0 ? "[" : ",") + std::to_string(shape[axis]);
  return text + (shape.empty() ? "[]" : "]");
}

}  // namespace

// --- a variant ------------------------------------------------------------------------------------------------------

Result<Model> Model::load(const HostLibrary& library, const Contract& contract, const Variant& variant,
                          const UnnamedFile& code, Weights& weights) {
  Model model;
  model.host_ = &library;
  model.contract_ = &contract;
  model.variant_ = &variant;
  if (auto opened = model.open(code); !opened) return opened.error();
  if (auto found = model.look_up(); !found) return found.error();
  if (model.calls_.create(&model.container_, 1, "cpu", nullptr) != 0) return model.failed();
  if (auto counts = model.check_counts(); !counts) return counts.error();
  if (auto bound = model.bind_constants(weights); !bound) return bound.error();
  return model;
}

Model::~Model() {
  if (container_ != nullptr) calls_.remove(container_);
  if (host_ != nullptr)
    for (auto* tensors : {&inputs_, &outputs_, &constants_}) delete_all(*tensors);
  // The library stays: threads that OpenMP keeps may still be inside it.
  if (fd_ >= 0) close(fd_);
}

void Model::swap(Model& other) noexcept {
  std::swap(host_, other.host_);
  std::swap(contract_, other.contract_);
  std::swap(variant_, other.variant_);
  std::swap(fd_, other.fd_);
  std::swap(library_, other.library_);
  std::swap(container_, other.container_);
  std::swap(constants_, other.constants_);
  std::swap(inputs_, other.inputs_);
  std::swap(outputs_, other.outputs_);
  std::swap(calls_, other.calls_);
}

Status Model::open(const UnnamedFile& code) {
  fd_ = code.fd;
  const auto loaded = load_code(code);
  if (!loaded) return host("cannot load variant `" + variant_->name + "`: " + loaded.error().text);
  library_ = *loaded;
  return Done{};
}

Status Model::look_up() {
  const bool found =
      find_symbol(library_, "AOTInductorModelContainerCreateWithDevice", calls_.create) &&
      find_symbol(library_, "AOTInductorModelContainerDelete", calls_.remove) &&
      find_symbol(library_, "AOTInductorModelContainerRunSingleThreaded", calls_.run) &&
      find_symbol(library_, "AOTInductorModelContainerUpdateUserManagedConstantBufferPairs", calls_.update) &&
      find_symbol(library_, "AOTInductorModelContainerGetNumConstants", calls_.count_constants) &&
      find_symbol(library_, "AOTInductorModelContainerGetNumInputs", calls_.count_inputs) &&
      find_symbol(library_, "AOTInductorModelContainerGetNumOutputs", calls_.count_outputs) &&
      find_symbol(library_, "AOTInductorModelContainerGetConstantName", calls_.constant_name) &&
      find_symbol(library_, "AOTInductorModelContainerGetConstantOriginalFQN", calls_.constant_fqn) &&
      find_symbol(library_, "AOTInductorModelContainerGetConstantFromFolded", calls_.constant_folded) &&
      find_symbol(library_, "AOTInductorModelContainerGetConstantDtype", calls_.constant_dtype) &&
      find_symbol(library_, "AOTInductorGetLastError", calls_.last_error);
  if (!found) return damaged("variant `" + variant_->name + "` is no AOTInductor library: " + dl_error());
  return Done{};
}

Status Model::check_counts() const {
  std::size_t inputs = 0, outputs = 0;
  if (calls_.count_inputs(container_, &inputs) != 0 || calls_.count_outputs(container_, &outputs) != 0) return failed();
  if (inputs == contract_->inputs.size() && outputs == contract_->outputs.size()) return Done{};
  return damaged("variant `" + variant_->name + "` takes " + std::to_string(inputs) + " inputs and gives " +
                 std::to_string(outputs) + " outputs, the contract says " + std::to_string(contract_->inputs.size()) +
                 " and " + std::to_string(contract_->outputs.size()));
}

// Hands over the tensors where they lie: they stay this object's.
Status Model::bind_constants(Weights& weights) {
  std::size_t count = 0;
  if (calls_.count_constants(container_, &count) != 0) return failed();
  std::vector<Pair> pairs;
  for (std::size_t i = 0; i < count; ++i) {
    bool folded = false;
    const char *name = nullptr, *original = nullptr;
    if (calls_.constant_folded(container_, i, &folded) != 0 || calls_.constant_name(container_, i, &name) != 0 ||
        calls_.constant_fqn(container_, i, &original) != 0)
      return failed();
    if (folded) continue;  // the library computes it from the others
    const auto tensor = constant(i, original != nullptr && *original != '\0' ? original : name, weights);
    if (!tensor) return tensor.error();
    constants_.push_back(*tensor);
    pairs.push_back({name, *tensor});
  }
  if (!pairs.empty() && calls_.update(container_, pairs.data(), pairs.size(), false, true) != 0) return failed();
  return Done{};
}

Result<AtenTensor> Model::constant(std::size_t index, const std::string& name, Weights& weights) const {
  const std::string where = "constant `" + name + "` of variant `" + variant_->name + "`";
  const auto listed = variant_->constants.find(name);
  if (listed == variant_->constants.end()) return damaged(where + " is not in the manifest");
  const auto tensor = weights.tensor(name, listed->second);
  if (!tensor) return tensor.error();
  std::int32_t dtype = 0;
  if (calls_.constant_dtype(container_, index, &dtype) != 0) return failed();
  if (dtype != host_->dtypes_[static_cast<std::size_t>(tensor->dtype)])
    return damaged(where + " is another dtype in the weights than in the library");
  const auto strides = listed->second.stride.empty() ? row_major(tensor->shape) : listed->second.stride;
  const std::size_t item = item_size(tensor->dtype);
  if (!fits(tensor->shape, strides, static_cast<std::int64_t>(tensor->data.size() / item)))
    return damaged(where + " has strides that reach beyond its tensor");
  return host_->tensor(tensor->data.data(), tensor->dtype, tensor->shape, strides);
}

// --- a call ---------------------------------------------------------------------------------------------------------

Status Model::run(std::span<const std::int64_t> dims, std::span<std::byte* const> inputs,
                  std::span<const std::span<std::byte>> outputs) {
  if (auto made = make_inputs(dims, inputs); !made) return made;
  outputs_.assign(outputs.size(), nullptr);
  const int status =
      calls_.run(container_, inputs_.data(), inputs_.size(), outputs_.data(), outputs_.size(), nullptr, nullptr);
  inputs_.clear();  // the library took them, also where it failed
  Status result = status == 0 ? Status(Done{}) : failed();
  for (std::size_t i = 0; result && i < outputs.size(); ++i)
    result = take_output(contract_->outputs[i], outputs_[i], dims, outputs[i]);
  delete_all(outputs_);
  return result;
}

Status Model::make_inputs(std::span<const std::int64_t> dims, std::span<std::byte* const> inputs) {
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const auto shape = shape_of(contract_->inputs[i], dims);
    const auto tensor = shape ? host_->tensor(inputs[i], contract_->inputs[i].dtype, *shape, row_major(*shape))
                              : Result<AtenTensor>(shape.error());
    if (!tensor) {
      delete_all(inputs_);
      return tensor.error();
    }
    inputs_.push_back(*tensor);
  }
  return Done{};
}

Status Model::take_output(const Tensor& declared, AtenTensor tensor, std::span<const std::int64_t> dims,
                          std::span<std::byte> output) const {
  const auto wanted = shape_of(declared, dims);
  if (!wanted) return wanted.error();
  const auto bytes = bytes_of(declared.dtype, *wanted);
  const auto& calls = host_->calls_;
  void* data = nullptr;
  std::int64_t rank = 0, *sizes = nullptr, *strides = nullptr;
  std::int32_t dtype = 0;
  if (tensor == nullptr || calls.dtype(tensor, &dtype) != 0 || calls.rank(tensor, &rank) != 0 ||
      calls.sizes(tensor, &sizes) != 0 || calls.strides(tensor, &strides) != 0 || calls.data(tensor, &data) != 0)
    return Error{Code::model, "the model gave no tensor for output '" + declared.name + "'"};
  const std::span shape(sizes, static_cast<std::size_t>(rank));
  const auto& dtypes = host_->dtypes_;
  const auto known = std::find(dtypes.begin(), dtypes.end(), dtype);
  if (known != dtypes.begin() + static_cast<std::ptrdiff_t>(declared.dtype) || !std::ranges::equal(shape, *wanted)) {
    const auto name = known != dtypes.end() ? name_of(static_cast<Dtype>(known - dtypes.begin())) : "another dtype";
    return Error{Code::model, "the model gave output '" + declared.name + "' as " + described(name, shape) +
                                  ", the contract says " + described(name_of(declared.dtype), *wanted)};
  }
  if (!bytes || *bytes > output.size())
    return Error{Code::internal, "output '" + declared.name + "' is larger than its place"};
  copy_row_major(output.data(), static_cast<const std::byte*>(data), shape, {strides, shape.size()},
                 item_size(declared.dtype));
  return Done{};
}

void Model::delete_all(std::vector<AtenTensor>& tensors) const {
  std::ranges::sort(tensors);  // a model that returns one tensor twice gives its handle twice
  tensors.erase(std::unique(tensors.begin(), tensors.end()), tensors.end());
  for (const AtenTensor tensor : tensors)
    if (tensor != nullptr) host_->calls_.remove(tensor);
  tensors.clear();
}

// The library's own text; where that only says which call into torch failed, torch's.
Error Model::failed() const {
  const char* text = nullptr;
  std::string error = calls_.last_error(&text) == 0 && text != nullptr ? text : "";
  if (error.empty() || error.find("API call failed") != std::string::npos)
    if (const auto cause = host_->last_error(); !cause.empty()) error = cause;
  return {Code::model, error.empty() ? "the model failed and did not say why" : first_line(error)};
}

}  // namespace mctl
