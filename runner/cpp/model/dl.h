// Symbols of libraries that are loaded at run time.
#pragma once

#include <dlfcn.h>

#include <string>
#include <string_view>

namespace mctl {

inline std::string dl_error() {
  const char* text = dlerror();
  return text != nullptr ? text : "unknown error";
}

template <class Function>
bool find_symbol(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

// Text of an error that ends with where in the library it was noticed: the first line says what.
inline std::string first_line(std::string_view text) { return std::string(text.substr(0, text.find('\n'))); }

}  // namespace mctl
