// Compiled variants, spoken to through the plain C interface that each exports alone:
// torch/csrc/inductor/aoti_runtime/interface.h.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "format/contract.h"
#include "format/manifest.h"
#include "format/result.h"
#include "format/weights.h"
#include "model/host_library.h"
#include "model/unnamed_file.h"

namespace mctl {

// One compiled library with its constants. One thread at a time may run it.
class Model {
 public:
  // `code` is the variant's, already verified; its descriptor is the model's from now on. library, contract, variant
  // and weights have to outlive the model.
  static Result<Model> load(const HostLibrary& library, const Contract& contract, const Variant& variant,
                            const UnnamedFile& code, Weights& weights);
  Model(Model&& other) noexcept { swap(other); }
  Model& operator=(Model&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Model();

  // Runs on `inputs` where they lie (row-major, 64-byte aligned, with the sizes that `dims` gives them) and copies the
  // results, row-major, to `outputs`. Code::model: the model failed, or gave what the contract does not say.
  Status run(std::span<const std::int64_t> dims, std::span<std::byte* const> inputs,
             std::span<const std::span<std::byte>> outputs);

 private:
  using Container = struct ContainerOpaque*;
  struct Pair {
    const char* name;
    AtenTensor tensor;
  };
  struct Calls {
    int (*create)(Container*, std::size_t models, const char* device, const char* cubin_dir);
    int (*remove)(Container);
    int (*run)(Container, AtenTensor* inputs, std::size_t, AtenTensor* outputs, std::size_t, void* stream, void* proxy);
    int (*update)(Container, const Pair*, std::size_t, bool use_inactive, bool validate_full_update);
    int (*count_constants)(Container, std::size_t*);
    int (*count_inputs)(Container, std::size_t*);
    int (*count_outputs)(Container, std::size_t*);
    int (*constant_name)(Container, std::size_t, const char**);
    int (*constant_fqn)(Container, std::size_t, const char**);
    int (*constant_folded)(Container, std::size_t, bool*);
    int (*constant_dtype)(Container, std::size_t, std::int32_t*);
    int (*last_error)(const char**);
  };
  Model() = default;
  void swap(Model& other) noexcept;
  Status open(const UnnamedFile& code);
  Status look_up();
  Status check_counts() const;
  Status bind_constants(Weights& weights);
  Result<AtenTensor> constant(std::size_t index, const std::string& name, Weights& weights) const;
  Status make_inputs(std::span<const std::int64_t> dims, std::span<std::byte* const> inputs);
  Status take_output(const Tensor& declared, AtenTensor tensor, std::span<const std::int64_t> dims,
                     std::span<std::byte> output) const;
  void delete_all(std::vector<AtenTensor>& tensors) const;
  Error failed() const;

  const HostLibrary* host_ = nullptr;
  const Contract* contract_ = nullptr;
  const Variant* variant_ = nullptr;
  int fd_ = -1;  // kept open: dlopen knows a library by its name, and the descriptor's number is the name
  void* library_ = nullptr;
  Container container_ = nullptr;
  Calls calls_{};
  std::vector<AtenTensor> constants_, inputs_, outputs_;
};

}  // namespace mctl
