#include "pool/model_areas.h"

#include <algorithm>

namespace mctl {
namespace {

Status measure(const std::vector<Tensor>& tensors, const std::vector<Dim>& dims, std::vector<std::size_t>& areas) {
  for (const Tensor& tensor : tensors) {
    const auto bytes = capacity_of(tensor, dims);
    if (!bytes)
      return Error{Code::host, "no room for the model's largest batch: " + bytes.error().text +
                                   "; choose a smaller `--max-batch-size`"};
    areas.push_back(*bytes);
  }
  return Done{};
}

}  // namespace

Result<Areas> model_areas(const Contract& contract, std::optional<std::int64_t> max_rows) {
  std::vector<Dim> dims = contract.dims;
  if (max_rows && contract.batch_dim) {
    Dim& batch = dims[*contract.batch_dim];
    batch.max = std::max(*max_rows, batch.min);
  }
  Areas areas;
  if (auto measured = measure(contract.inputs, dims, areas.inputs); !measured) return measured.error();
  if (auto measured = measure(contract.outputs, dims, areas.outputs); !measured) return measured.error();
  return areas;
}

Status reserve(Arena& arena, int slot, const Contract& contract, const DimSizes& sizes) {
  for (std::size_t i = 0; i < contract.inputs.size(); ++i) {
    const auto bytes = bytes_of(contract.inputs[i], sizes);
    if (!bytes) return bytes.error();
    if (auto reserved = arena.reserve_input(slot, i, *bytes); !reserved) return reserved;
  }
  for (std::size_t i = 0; i < contract.outputs.size(); ++i) {
    const auto bytes = bytes_of(contract.outputs[i], sizes);
    if (!bytes) return bytes.error();
    if (auto reserved = arena.reserve_output(slot, i, *bytes); !reserved) return reserved;
  }
  return Done{};
}

}  // namespace mctl
