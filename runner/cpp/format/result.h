// A value or an error: text for a person plus a code for the program. Nothing below main prints or throws across files.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <variant>

namespace mctl {

enum class Code {
  invalid,        // the client's request (400)
  unauthorized,   // 401
  forbidden,      // 403
  not_found,      // 404
  method,         // 405
  too_slow,       // 408
  conflict,       // with what the server has or does (409)
  outdated,       // the state has changed since it was read (412)
  too_large,      // 413
  unsupported,    // 415
  model,          // the model failed on this request (500)
  unsayable,      // the answer cannot be said in the format that was asked for (422)
  unimplemented,  // 501
  unavailable,    // 503
  deadline,       // 504
  damaged,        // the bundle breaks the format
  host,           // this machine cannot run the bundle
  usage,          // wrong options
  internal,
};

struct Error {
  Code code = Code::internal;
  std::string text;
  std::int64_t retry_after_s = 1;  // of `unavailable`: when it is worth another try
};

template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : content_(std::in_place_index<0>, std::move(value)) {}
  Result(Error error) : content_(std::in_place_index<1>, std::move(error)) {}

  explicit operator bool() const { return content_.index() == 0; }
  T& operator*() & { return std::get<0>(content_); }
  const T& operator*() const& { return std::get<0>(content_); }
  T&& operator*() && { return std::get<0>(std::move(content_)); }
  T* operator->() { return &std::get<0>(content_); }
  const T* operator->() const { return &std::get<0>(content_); }
  const Error& error() const { return std::get<1>(content_); }

 private:
  std::variant<T, Error> content_;
};

struct Done {};
using Status = Result<Done>;

}  // namespace mctl
