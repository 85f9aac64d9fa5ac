#include "failure.h"

#include <cstdarg>
#include <cstdio>
#include <stdexcept>

namespace mctl::shim {
namespace {

thread_local char text[512];

}  // namespace

AOTITorchError fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  return kFailed;
}

MCTL_EXPORT const char* torch_exception_get_what() { return text; }
MCTL_EXPORT const char* torch_exception_get_what_without_backtrace() { return text; }

// The one function that throws: the code that calls it returns to its caller by that.
MCTL_EXPORT void aoti_torch_check(bool condition, const char* function, const char*, std::uint32_t,
                                  const char* message) {
  if (condition) return;
  const bool said = message != nullptr && *message != '\0';
  fail("%s%s", said ? "" : "a check failed in ", said ? message : function);
  throw std::runtime_error(text);
}

MCTL_EXPORT void aoti_torch_warn(const char*, const char*, std::uint32_t, const char* message) {
  std::fprintf(stderr, "warning: %s\n", message);
}

}  // namespace mctl::shim
