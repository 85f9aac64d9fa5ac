#include "small_bundle.h"

#include <sys/mman.h>
#include <unistd.h>

#include "format/sha256.h"
#include "support.h"

namespace mctl {
namespace {

std::string little(std::uint64_t value, int bytes) {
  std::string text;
  for (int i = 0; i < bytes; ++i) text += static_cast<char>(value >> (8 * i));
  return text;
}

}  // namespace

std::string zip_of(const Members& members, const std::map<std::string, std::pair<std::size_t, std::string>>& edits) {
  const auto edited = [&](const std::string& name, std::string record) {
    if (const auto edit = edits.find(name); edit != edits.end())
      record.replace(edit->second.first, edit->second.second.size(), edit->second.second);
    return record;
  };
  std::string file, central;
  for (const auto& [name, data] : members) {
    const std::size_t start = file.size();
    const std::size_t padding = (64 - (start + 30 + name.size() + 4) % 64) % 64;
    const std::string both = little(0x0800, 2) + little(0, 2) + little(0x21 << 16, 4) + little(0, 4) +
                             little(data.size(), 4) + little(data.size(), 4) + little(name.size(), 2);
    const std::string extra = "FB" + little(padding, 2) + std::string(padding, '\0');
    file += edited("local " + name, "PK\3\4" + little(20, 2) + both + little(extra.size(), 2) + name + extra);
    file += data;
    central += edited("central " + name, "PK\1\2" + little(20, 2) + little(20, 2) + both + little(0, 2) + little(0, 2) +
                                             little(0, 2) + little(0, 2) + little(0, 4) + little(start, 4) + name);
  }
  const std::string counts = little(members.size(), 2) + little(members.size(), 2);
  return file + central +
         edited("end",
                "PK\5\6" + little(0, 4) + counts + little(central.size(), 4) + little(file.size(), 4) + little(0, 2));
}

std::string safetensors_of(std::string header, const std::string& data) {
  header.append((64 - (8 + header.size()) % 64) % 64, ' ');
  return little(header.size(), 8) + header + data;
}

std::string small_manifest(const Members& others) {
  boost::json::object members;
  for (const auto& [name, data] : others)
    members[name.substr(name.find('/') + 1)] = {{"size", data.size()}, {"sha256", sha256(bytes_of(data))}};
  boost::json::object manifest = boost::json::parse(R"({
    "schema": "mctl.bundle/1", "name": "small", "version": "1", "created": "2026-01-01T00:00:00+00:00",
    "producer": {"mctl": "0.1.0", "torch": "2.13.0", "flags": ["-O2"]},
    "source": {"file": "small.py", "sha256": "", "model": "model", "seed": 0},
    "contract": {
      "dims": [{"name": "batch", "min": 1, "max": 8}, {"name": "n", "min": 4, "max": 16, "multiple": 4}],
      "inputs": [{"name": "x", "dtype": "float32", "shape": ["batch", "n"], "pad": 0.5},
                 {"name": "ids", "dtype": "int64", "shape": ["batch"], "range": [0, 9]}],
      "outputs": [{"name": "y", "dtype": "float32", "shape": ["2*batch", "n+1"]}],
      "constants": [{"name": "k", "value": 2}],
      "state": [{"name": "count", "dtype": "int64", "shape": []}],
      "batch_dim": "batch", "batch_note": ""},
    "golden": [{"name": "first", "member": "mctl/golden/first.safetensors", "dims": {"batch": 1, "n": 4}}],
    "tolerances": {"y": {"rtol": 0.0001, "atol": 1e-05}},
    "target": {"os": "linux", "arch": "x86_64", "isa": "x86-64-v2", "features": [], "glibc": "2.17"},
    "buckets": {"batch": [1, 2, 8], "n": [4, 16]},
    "variants": [{"name": "dynamic", "library": "data/aotinductor/dynamic/a.so",
                  "covers": {"batch": [1, 8], "n": [4, 16]}, "imports": ["aoti_torch_clone"],
                  "constants": {"w": {"tensor": "w", "stride": [1, 2]}, "count": {"tensor": "count", "state": true}}}],
    "preprocessing": {"tokenizer": {"lower": true}}, "notes": ["made by hand"], "parity": "skipped"})")
                                     .as_object();
  manifest["members"] = std::move(members);
  return boost::json::serialize(manifest);
}

Members small_members() {
  Members members;
  members.emplace_back("small/data/aotinductor/dynamic/a.so",
                       "\x7f"
                       "ELF, but no more");
  members.emplace_back("small/mctl/weights.safetensors", safetensors_of(R"({
    "w": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
    ".pad/0": {"dtype": "U8", "shape": [48], "data_offsets": [16, 64]},
    "count": {"dtype": "I64", "shape": [], "data_offsets": [64, 72]}})",
                                                                        std::string(72, '\1')));
  members.emplace_back("small/mctl/golden/first.safetensors", safetensors_of(R"({
    "input.x": {"dtype": "F32", "shape": [1, 4], "data_offsets": [0, 16]},
    ".pad/0": {"dtype": "U8", "shape": [48], "data_offsets": [16, 64]},
    "input.ids": {"dtype": "I64", "shape": [1], "data_offsets": [64, 72]},
    ".pad/1": {"dtype": "U8", "shape": [56], "data_offsets": [72, 128]},
    "output.y": {"dtype": "F32", "shape": [2, 5], "data_offsets": [128, 168]}})",
                                                                             std::string(168, '\0')));
  members.emplace_back("small/extra/mctl/manifest.json", small_manifest(members));
  return members;
}

int file_of(const std::string& bytes) {
  const int fd = memfd_create("bundle", MFD_CLOEXEC);
  return write(fd, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()) ? fd : -1;
}

}  // namespace mctl
