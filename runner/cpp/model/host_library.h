// What gives compiled code its tensors: libtorch_cpu, or mctl's own library of shim/ in its place. Both speak the plain
// C interface of torch/csrc/inductor/aoti_torch/c/shim.h: no torch headers, no link to torch.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>

#include "format/contract.h"
#include "format/result.h"
#include "model/unnamed_file.h"

namespace mctl {

using AtenTensor = struct AtenTensorOpaque*;

// Made global for the variants that are loaded later. It stays for the life of the process.
class HostLibrary {
 public:
  // `path`: the library, or the folder that holds libtorch_cpu.so; empty: the shim that lies beside this program.
  // `threads`: of OpenMP, for what the library starts.
  static Result<HostLibrary> load(const std::string& path, int threads);
  // The libtorch_cpu.so that lies beside this program, as `mctl pack` lays it; empty if there is none.
  static std::string libtorch_beside();

  bool is_shim() const { return is_shim_; }
  bool has(const std::string& import) const;
  // Operators of a bundle's own, which register themselves with libtorch.
  Status load_operators(const std::string& name, const UnnamedFile& code) const;
  void set_threads(int threads) const;  // of the calling thread's parallel regions
  std::string last_error() const;       // of the calling thread; empty if this library does not tell

  Result<AtenTensor> tensor(void* data, Dtype dtype, std::span<const std::int64_t> sizes,
                            std::span<const std::int64_t> strides) const;

 private:
  friend class Model;
  Status look_up();
  const char* name() const { return is_shim_ ? "mctl's shim" : "this libtorch"; }

  void* handle_ = nullptr;
  std::string folder_;  // that the library lies in, with a slash at its end
  bool is_shim_ = false;
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
    const char* (*what)();
    void (*set_omp_threads)(int);  // of the libgomp that the library uses; null where it uses none
  } calls_{};
};

}  // namespace mctl
