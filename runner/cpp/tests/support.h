// What several tests need.
#pragma once

#include <boost/json.hpp>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <span>
#include <string>
#include <string_view>

#include "format/result.h"

namespace mctl {

inline std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// A file of tests/vectors: `contract/check.json`.
inline boost::json::value vectors(const std::string& path) {
  return boost::json::parse(read_file(std::filesystem::path(VECTORS) / path));
}

template <class T>
std::string why(const Result<T>& result) {
  return result ? "" : result.error().text;
}

inline std::span<const std::byte> bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

}  // namespace mctl
