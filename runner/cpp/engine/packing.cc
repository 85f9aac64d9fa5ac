#include "engine/packing.h"

#include <algorithm>
#include <cstring>

#include "format/elements.h"
#include "format/lookup.h"

namespace mctl {
namespace {

constexpr std::size_t kMaxShared = 4 << 10;  // bytes of inputs without rows that are compared to share a batch

using Shape = std::vector<std::int64_t>;

std::size_t elements(std::span<const std::int64_t> shape) {
  std::size_t count = 1;
  for (const std::int64_t size : shape) count *= static_cast<std::size_t>(size);
  return count;
}

std::span<const std::int64_t> inner(const Shape& shape) { return std::span(shape).subspan(shape.empty() ? 0 : 1); }

// Copies the box [0, extent) between row-major arrays of the shapes `to` and `from`.
void copy_box(std::byte* target, std::span<const std::int64_t> to, const std::byte* source,
              std::span<const std::int64_t> from, std::span<const std::int64_t> extent, std::size_t item) {
  const bool whole = extent.empty() || (std::ranges::equal(to.subspan(1), from.subspan(1)) &&
                                        std::ranges::equal(to.subspan(1), extent.subspan(1)));
  if (whole) {
    std::memcpy(target, source, elements(extent) * item);
    return;
  }
  const std::size_t to_step = elements(to.subspan(1)) * item, from_step = elements(from.subspan(1)) * item;
  for (std::int64_t i = 0; i < extent[0]; ++i) {
    copy_box(target + i * to_step, to.subspan(1), source + i * from_step, from.subspan(1), extent.subspan(1), item);
  }
}

void repeat(std::byte* target, std::size_t count, const std::array<std::byte, 8>& filler, std::size_t item) {
  for (std::size_t i = 0; i < count; ++i) std::memcpy(target + i * item, filler.data(), item);
}

// The pad value, or the allowed value that is nearest to zero.
std::array<std::byte, 8> filler_of(const Tensor& input, std::span<const std::int64_t> dims) {
  double value = input.pad.value_or(0);
  if (!input.pad && input.range) {
    const auto [low, high] = limits_of(input, dims);
    value = static_cast<double>(std::clamp<std::int64_t>(0, low, high));
  }
  std::array<std::byte, 8> filler{};
  store(input.dtype, value, filler.data());
  return filler;
}

}  // namespace

Packing::Packing(const Manifest& manifest) : contract_(manifest.contract) {
  batch_dim_ = contract_.state.empty() ? contract_.batch_dim : std::nullopt;
  buckets_.resize(contract_.dims.size());
  for (std::size_t d = 0; d < contract_.dims.size(); ++d) {
    const auto found = manifest.buckets.find(contract_.dims[d].name);
    if (found != manifest.buckets.end()) buckets_[d] = found->second;
  }
  DimSizes smallest;
  for (const Dim& dim : contract_.dims) smallest.push_back(dim.min);
  for (const Tensor& input : contract_.inputs) fillers_.push_back(filler_of(input, smallest));
  for (const Tensor& output : contract_.outputs) {
    per_item_.push_back(batch_dim_ ? rows_per_item(output, *batch_dim_) : std::nullopt);
    const bool batched = std::any_of(output.shape.begin(), output.shape.end(),
                                     [&](const Expression& axis) { return batch_dim_ && axis.uses(*batch_dim_); });
    if (batched && !per_item_.back()) batch_dim_.reset();
  }
  if (!batch_dim_) per_item_.assign(contract_.outputs.size(), std::nullopt);
}

bool Packing::has_rows(const Tensor& input) const {
  return batch_dim_ && !input.shape.empty() && input.shape[0].dim() == batch_dim_;
}

std::string Packing::kind_of(const DimSizes& dims) const {
  std::string kind;
  const DimSizes padded = sizes(dims, 1);
  for (std::size_t d = 0; d < padded.size(); ++d) {
    if (d != batch_dim_) kind.append(reinterpret_cast<const char*>(&padded[d]), sizeof padded[d]);
  }
  return kind;
}

std::string Packing::key_of(std::string kind, std::span<const std::span<const std::byte>> inputs) {
  if (!batch_dim_) return {};
  std::string key = std::move(kind);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (has_rows(contract_.inputs[i])) continue;
    if (inputs[i].size() > kMaxShared) return lone_key();
    // Shapes are equal where padded sizes are, unless a shared input is padded itself.
    key += std::to_string(inputs[i].size()) + ':';
    key.append(reinterpret_cast<const char*>(inputs[i].data()), inputs[i].size());
  }
  return key;
}

std::string Packing::lone_key() { return "alone " + std::to_string(++alone_); }

DimSizes Packing::sizes(const DimSizes& dims, std::int64_t rows) const {
  DimSizes sizes = dims;
  for (std::size_t d = 0; d < sizes.size(); ++d) {
    const Dim& dim = contract_.dims[d];
    if (d == batch_dim_) {
      sizes[d] = (std::max(rows, dim.min) + dim.multiple - 1) / dim.multiple * dim.multiple;
    } else if (batch_dim_) {
      sizes[d] = mctl::bucket_of(sizes[d], buckets_[d]);
    }
  }
  return sizes;
}

std::string Packing::bucket_of(const DimSizes& sizes) const {
  std::string name;
  for (std::size_t d = 0; d < sizes.size(); ++d) {
    if (buckets_[d].empty()) continue;
    name += (name.empty() ? "" : ",") + contract_.dims[d].name + '=' + std::to_string(sizes[d]);
  }
  return name.empty() ? "none" : name;
}

Status Packing::possible(const DimSizes& dims) const {
  for (const DimSizes& sizes : {dims, this->sizes(dims, rows_of(dims))}) {
    for (const Tensor& output : contract_.outputs) {
      if (auto bytes = bytes_of(output, sizes); !bytes) return bytes.error();
    }
  }
  return Done{};
}

void Packing::fill(Arena& arena, int slot, const DimSizes& sizes, const Piece& piece) const {
  for (std::size_t i = 0; i < contract_.inputs.size(); ++i) {
    const Tensor& input = contract_.inputs[i];
    const std::size_t item = item_size(input.dtype);
    const Shape from = *shape_of(input, *piece.dims), to = *shape_of(input, sizes);
    Shape extent = from;
    std::byte* target = arena.input(slot, i).data();
    const std::byte* source = piece.inputs[i].data();
    if (has_rows(input)) {
      extent[0] = piece.rows;
      target += piece.at_row * elements(inner(to)) * item;
      source += piece.first_row * elements(inner(from)) * item;
    } else if (piece.at_row > 0) {
      continue;  // the same for all of the batch
    }
    Shape area = to;
    if (!area.empty()) area[0] = has_rows(input) ? piece.rows : to[0];
    if (area != extent) repeat(target, elements(area), fillers_[i], item);
    copy_box(target, to, source, from, extent, item);
  }
}

void Packing::fill_pad_rows(Arena& arena, int slot, const DimSizes& sizes, std::int64_t used) const {
  if (!batch_dim_) return;
  for (std::size_t i = 0; i < contract_.inputs.size(); ++i) {
    const Tensor& input = contract_.inputs[i];
    if (!has_rows(input)) continue;
    const std::size_t item = item_size(input.dtype), row = elements(inner(*shape_of(input, sizes)));
    repeat(arena.input(slot, i).data() + used * row * item, (sizes[*batch_dim_] - used) * row, fillers_[i], item);
  }
}

Result<OutputView> Packing::cut(Arena& arena, int slot, const DimSizes& sizes, const Piece& piece, std::size_t output,
                                std::vector<std::byte>& storage) const {
  const Tensor& declared = contract_.outputs[output];
  const std::size_t item = item_size(declared.dtype);
  const Shape from = *shape_of(declared, sizes);
  Shape want = *shape_of(declared, *piece.dims);
  const std::span<const std::byte> area = arena.output(slot, output);
  if (elements(from) * item > area.size()) return Error{Code::internal, "output '" + declared.name + "' has no room"};
  std::size_t begin = 0;
  if (per_item_[output]) {
    want[0] = piece.rows * *per_item_[output];
    begin = piece.at_row * *per_item_[output] * elements(inner(from)) * item;
  }
  const std::size_t bytes = elements(want) * item;
  const bool together = std::ranges::equal(inner(from), inner(want));
  if (together) return OutputView{std::move(want), area.subspan(begin, bytes)};
  storage.resize(bytes);
  copy_box(storage.data(), want, area.data() + begin, from, want, item);
  return OutputView{std::move(want), storage};
}

std::size_t Packing::offset_in_output(std::size_t output, const DimSizes& dims, std::int64_t row) const {
  if (!per_item_[output]) return 0;
  const Shape shape = *shape_of(contract_.outputs[output], dims);
  return row * *per_item_[output] * elements(inner(shape)) * item_size(contract_.outputs[output].dtype);
}

}  // namespace mctl
