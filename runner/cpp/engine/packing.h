// How requests share a batch: which sizes it gets, where their rows lie in it, and how their answers are cut out of it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/call.h"
#include "format/contract.h"
#include "format/manifest.h"
#include "pool/arena.h"

namespace mctl {

// Rows of one request in a batch.
struct Piece {
  std::span<const std::span<const std::byte>> inputs;  // of the whole request, in the contract's order
  const DimSizes* dims = nullptr;                      // of the whole request
  std::int64_t first_row = 0, rows = 0;                // of the request's
  std::int64_t at_row = 0;                             // of the batch
};

class Packing {
 public:
  explicit Packing(const Manifest& manifest);

  // The dim that batches grow; nullopt: a request is a batch. It needs outputs that can be cut by rows, and no state.
  std::optional<std::size_t> batch_dim() const { return batch_dim_; }
  std::int64_t rows_of(const DimSizes& dims) const { return batch_dim_ ? dims[*batch_dim_] : 1; }

  // What, beside its rows, a batch's cost depends on: the sizes of the other dims, padded.
  std::string kind_of(const DimSizes& dims) const;
  // What a request must have in common with another to share its batch: its kind, and inputs without rows.
  std::string key_of(std::string kind, std::span<const std::span<const std::byte>> inputs);
  std::string lone_key();  // one that no other request has
  // Sizes that a batch of these requests runs with; `rows` are padded already.
  DimSizes sizes(const DimSizes& dims, std::int64_t rows) const;
  // `batch=8,seq=32`: the padded dims only, so that there are few.
  std::string bucket_of(const DimSizes& sizes) const;

  // Does every output have a size for these, alone and padded? What was proven at export says yes.
  Status possible(const DimSizes& dims) const;

  // Writes a piece's inputs; then, once for a batch, the rows that nobody asked for.
  void fill(Arena& arena, int slot, const DimSizes& sizes, const Piece& piece) const;
  void fill_pad_rows(Arena& arena, int slot, const DimSizes& sizes, std::int64_t used) const;
  // A piece's rows of an output, in the slot where they lie together, else gathered in `storage`.
  // Code::internal if the slot has no room for what the contract says.
  Result<OutputView> cut(Arena& arena, int slot, const DimSizes& sizes, const Piece& piece, std::size_t output,
                         std::vector<std::byte>& storage) const;
  // Where in a whole request's output the rows begin that belong to its input row `row`, in bytes.
  std::size_t offset_in_output(std::size_t output, const DimSizes& dims, std::int64_t row) const;

 private:
  bool has_rows(const Tensor& input) const;

  const Contract& contract_;
  std::optional<std::size_t> batch_dim_;
  std::vector<std::vector<std::int64_t>> buckets_;     // of each dim; empty: not padded
  std::vector<std::array<std::byte, 8>> fillers_;      // one element of each input
  std::vector<std::optional<std::int64_t>> per_item_;  // rows of each output per row of the batch
  std::uint64_t alone_ = 0;                            // keys given to requests that share with nobody
};

}  // namespace mctl
