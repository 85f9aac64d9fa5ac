// Every path in the archive, and a reader's limits: the table of bundle_format/layout.py (a test compares the two).
#pragma once

#include <array>
#include <cstddef>
#include <string>
#include <string_view>

namespace mctl {

constexpr std::string_view kManifest = "extra/mctl/manifest.json";
constexpr std::string_view kReport = "extra/mctl/report.json";
constexpr std::string_view kWeights = "mctl/weights.safetensors";
constexpr std::string_view kOnnx = "mctl/program.onnx";
constexpr std::string_view kTokenizer = "mctl/tokenizer.json";
constexpr std::string_view kGolden = "mctl/golden/";
constexpr std::string_view kHandler = "mctl/handler/";
constexpr std::string_view kLibraries = "mctl/libraries/";
constexpr std::string_view kVariants = "data/aotinductor/";
constexpr std::size_t kAlignment = 64;

constexpr std::string_view kBundleSchema = "mctl.bundle/1";
constexpr std::string_view kNeedingSchema = "mctl.bundle/2";
constexpr std::string_view kProgramSchema = "mctl.program/1";

constexpr std::array<std::string_view, 3> kNeeds = {"libraries", "ranges-over-dims", "handler"};

constexpr std::size_t kMaxMembers = 1 << 16;
constexpr std::size_t kMaxName = 512;
constexpr std::size_t kMaxManifest = 16 << 20;
constexpr std::size_t kMaxReport = 64 << 20;
constexpr std::size_t kMaxJsonDepth = 32;
constexpr std::size_t kMaxJsonParts = 1 << 19;
constexpr std::size_t kMaxTensors = 1 << 17;
constexpr std::size_t kMaxTensorsHeader = 16 << 20;

// Why this UTF-8 cannot be a member's path; empty if it can: relative, with `/` between plain names.
std::string path_fault(std::string_view path);

}  // namespace mctl
