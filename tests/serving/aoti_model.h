// AOTInductor's interface, as far as it is the same for the models of these tests: one input, one output, no constants.
#pragma once

#include <cstddef>
#include <cstdint>

using Tensor = struct OpaqueTensor*;

extern "C" {
int aoti_torch_create_tensor_from_blob(void*, int64_t rank, const int64_t* sizes, const int64_t* strides,
                                       int64_t offset, int32_t dtype, int32_t device, int32_t device_index, Tensor*);
int aoti_torch_delete_tensor_object(Tensor);
int aoti_torch_get_data_ptr(Tensor, void**);
int aoti_torch_get_sizes(Tensor, int64_t**);
int32_t aoti_torch_dtype_int64();
}

#define EXPORT extern "C" __attribute__((visibility("default"))) int

inline int64_t container;  // what create gives is not looked into

EXPORT AOTInductorModelContainerCreateWithDevice(void** made, size_t, const char*, const char*) {
  *made = &container;
  return 0;
}

EXPORT AOTInductorModelContainerDelete(void*) { return 0; }

EXPORT AOTInductorModelContainerUpdateUserManagedConstantBufferPairs(void*, const void*, size_t, bool, bool) {
  return 0;
}

EXPORT AOTInductorModelContainerGetNumConstants(void*, size_t* count) { return *count = 0; }
EXPORT AOTInductorModelContainerGetNumInputs(void*, size_t* count) { return *count = 1, 0; }
EXPORT AOTInductorModelContainerGetNumOutputs(void*, size_t* count) { return *count = 1, 0; }
EXPORT AOTInductorModelContainerGetConstantName(void*, size_t, const char**) { return 1; }
EXPORT AOTInductorModelContainerGetConstantOriginalFQN(void*, size_t, const char**) { return 1; }
EXPORT AOTInductorModelContainerGetConstantFromFolded(void*, size_t, bool*) { return 1; }
EXPORT AOTInductorModelContainerGetConstantDtype(void*, size_t, int32_t*) { return 1; }
