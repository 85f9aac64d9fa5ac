// What a call that fails leaves behind: its text, for the thread that called. Nothing here throws or allocates.
#pragma once

#include <cstdint>

// What this library exports; everything else is hidden.
#define MCTL_EXPORT extern "C" __attribute__((visibility("default")))

namespace mctl::shim {

using AOTITorchError = std::int32_t;
constexpr AOTITorchError kDone = 0, kFailed = 1;

// Keeps the text, as printf would write it, and returns kFailed.
__attribute__((format(printf, 1, 2))) AOTITorchError fail(const char* format, ...);

}  // namespace mctl::shim
