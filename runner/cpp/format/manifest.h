// The manifest of a bundle, strictly read: mirrors bundle_format/manifest.py.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "format/contract.h"
#include "format/result.h"

namespace mctl {

struct Member {
  std::uint64_t size = 0;
  std::string sha256;
};

struct Target {
  std::string os, arch, isa, device, glibc, glibcxx;
  std::vector<std::string> features;
};

struct ConstantRef {
  std::string tensor;
  std::vector<std::int64_t> stride;  // empty: row-major
  bool state = false;
};

struct Variant {
  std::string name, library;
  std::map<std::string, std::pair<std::int64_t, std::int64_t>> covers;
  std::map<std::string, ConstantRef, std::less<>> constants;
  std::vector<std::string> imports;
  int threads = 0;
  bool bf16 = false;
};

// A C++ library with operators that the model calls by their names.
struct OperatorLibrary {
  std::string member;
  std::vector<std::string> operators;
};

struct Tolerance {
  double rtol = 0, atol = 0;
};

struct Golden {
  std::string name, member;
  std::map<std::string, std::int64_t> dims;
};

// One point of the curve: what a call of these sizes took.
struct Measured {
  std::map<std::string, std::int64_t> dims;
  std::int64_t threads = 0, median_us = 0;
};

// What was measured to choose among the variants. A choice: which one runs at these sizes on so many threads; `pad`:
// sizes below that have no choice of their own are padded to these.
struct Choice {
  std::map<std::string, std::int64_t> dims;
  std::int64_t threads = 0;
  std::string variant;
  bool pad = true;
};

struct Tuning {
  std::vector<Choice> choices, timings;  // of timings, the times are for people
  std::int64_t threads = 0;              // the best number for the largest sizes; 0: not known
};

// What makes tensors of raw requests: `stock:NAME`, or the member that holds Python code. The members are unpacked by
// the handler's process; the server itself does not read them.
struct Handler {
  std::string source;
  std::vector<std::string> assets;
  std::string golden;  // the member with golden requests; empty: none

  bool is_stock() const { return source.starts_with("stock:"); }
};

struct Manifest {
  std::string name, version, torch;  // torch: producer.torch
  bool standalone = false;           // runs through the shim, without libtorch
  std::vector<std::string> needs;    // names of kNeeds
  Contract contract;
  Target target;
  std::map<std::string, std::vector<std::int64_t>> buckets;
  std::vector<OperatorLibrary> libraries;  // loaded before the variants
  std::vector<Variant> variants;
  std::vector<Golden> golden;
  std::vector<Measured> curve;
  std::optional<Tuning> tuning;
  std::optional<Handler> handler;
  std::map<std::string, Tolerance> tolerances;
  std::map<std::string, Member, std::less<>> members;
  std::string digest;  // SHA-256 (hex) of the manifest's bytes: the bundle's identity
};

Result<Manifest> parse_manifest(std::string_view json);

bool covers(const Variant& variant, const Contract& contract, std::span<const std::int64_t> dims);

}  // namespace mctl
