// The tensors of weights.safetensors, mapped once for all variants; those that the model changes are private copies.
#pragma once

#include <cstdlib>
#include <map>
#include <memory>
#include <string>

#include "format/archive.h"
#include "format/manifest.h"
#include "format/safetensors.h"

namespace mctl {

class Weights {
 public:
  // Without weights in the archive there are no tensors. The bytes are those of the mapping, not yet verified.
  static Result<Weights> map(const Archive& archive);

  std::span<const std::byte> bytes() const { return mapping_.bytes(); }

  // The tensor of the constant `name`: mapped read-only, or, if it is state, the one writable copy that all variants
  // share. It is kept by the constant's name, because equal tensors are stored once.
  Result<StoredTensor> tensor(const std::string& name, const ConstantRef& constant);

  void reset();  // gives state its first value again

 private:
  struct Free {
    void operator()(std::byte* bytes) const { std::free(bytes); }
  };
  struct Copy {
    std::span<const std::byte> first;
    std::unique_ptr<std::byte, Free> bytes;
  };

  Mapping mapping_;
  StoredTensors tensors_;
  std::map<std::string, Copy, std::less<>> state_;
};

}  // namespace mctl
