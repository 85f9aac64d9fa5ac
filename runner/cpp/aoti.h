// Compiled variants, spoken to through AOTInductor's two plain C interfaces alone: no torch headers, no link to torch.
// What a library exports: torch/csrc/inductor/aoti_runtime/interface.h; what it imports of libtorch, and what makes
// tensors here: torch/csrc/inductor/aoti_torch/c/shim.h.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "contract.h"
#include "manifest.h"
#include "result.h"
#include "weights.h"

namespace mctl {

using AtenTensor = struct AtenTensorOpaque*;

// libtorch_cpu, made global for the variants that are loaded later. It stays for the life of the process.
class Libtorch {
 public:
  // `path`: the folder that holds libtorch_cpu.so, or the file. `threads`: of OpenMP, for what libtorch starts.
  static Result<Libtorch> load(const std::string& path, int threads);

  bool has(const std::string& symbol) const;
  void set_threads(int threads) const;  // of the calling thread's parallel regions
  std::string last_error() const;       // of the calling thread; empty if this libtorch does not tell

  Result<AtenTensor> tensor(void* data, Dtype dtype, std::span<const std::int64_t> sizes,
                            std::span<const std::int64_t> strides) const;

 private:
  friend class Model;
  Status look_up();

  void* handle_ = nullptr;
  std::array<std::int32_t, 13> dtypes_{};  // torch's number of each Dtype
  std::int32_t cpu_ = 0;
  struct Calls {
    int (*create)(void* data, std::int64_t rank, const std::int64_t* sizes, const std::int64_t* strides,
                  std::int64_t offset, std::int32_t dtype, std::int32_t device, std::int32_t device_index, AtenTensor*);
    int (*remove)(AtenTensor);
    int (*data)(AtenTensor, void**);
    int (*rank)(AtenTensor, std::int64_t*);
    int (*sizes)(AtenTensor, std::int64_t**);
    int (*strides)(AtenTensor, std::int64_t**);
    int (*dtype)(AtenTensor, std::int32_t*);
    void (*set_grad_mode)(bool);
    const char* (*what)();
    void (*set_omp_threads)(int);  // of the libgomp that libtorch uses; null where it uses none
  } calls_{};
};

// One compiled library with its constants. One thread at a time may run it.
class Model {
 public:
  // `code` is the library, already verified. libtorch, contract, variant and weights have to outlive the model.
  static Result<Model> load(const Libtorch& libtorch, const Contract& contract, const Variant& variant,
                            std::span<const std::byte> code, Weights& weights);
  Model(Model&& other) noexcept { swap(other); }
  Model& operator=(Model&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Model();

  const std::string& folder() const { return folder_; }  // that its code had to be loaded from; empty: from memory

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
  Status open(std::span<const std::byte> code);
  Status look_up();
  Status check_counts() const;
  Status bind_constants(Weights& weights);
  Result<AtenTensor> constant(std::size_t index, const std::string& name, Weights& weights) const;
  Status make_inputs(std::span<const std::int64_t> dims, std::span<std::byte* const> inputs);
  Status take_output(const Tensor& declared, AtenTensor tensor, std::span<const std::int64_t> dims,
                     std::span<std::byte> output) const;
  void delete_all(std::vector<AtenTensor>& tensors) const;
  Error failed() const;

  const Libtorch* libtorch_ = nullptr;
  const Contract* contract_ = nullptr;
  const Variant* variant_ = nullptr;
  int fd_ = -1;  // kept open: dlopen knows a library by its name, and the descriptor's number is the name
  std::string folder_;
  void* library_ = nullptr;
  Container container_ = nullptr;
  Calls calls_{};
  std::vector<AtenTensor> constants_, inputs_, outputs_;
};

}  // namespace mctl
