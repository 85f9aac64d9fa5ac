#include "format/safetensors.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>

#include "format/json.h"
#include "format/layout.h"
#include "format/text.h"

namespace mctl {
namespace {

namespace json = boost::json;

constexpr std::size_t kMaxRank = 64;
constexpr std::int64_t kMaxBytes = std::int64_t{1} << 62;

// In the order of Dtype.
constexpr std::array<std::string_view, 13> kNames{"BOOL", "U8",  "U16", "U32",  "U64", "I8", "I16",
                                                  "I32",  "I64", "F16", "BF16", "F32", "F64"};

struct Placed {
  std::string name;
  StoredTensor tensor;
  std::uint64_t begin, end;  // of the bytes after the header
};

Placed read_placed(std::string name, const json::value& value, std::string& fault) {
  Fields fields(value, "tensor `" + name + "`", fault);
  Placed placed{std::move(name), {}, 0, 0};
  const std::string dtype = fields.text("dtype");
  const auto known = std::find(kNames.begin(), kNames.end(), dtype);
  if (known == kNames.end()) fields.fail("dtype", "is not known");
  if (known != kNames.end()) placed.tensor.dtype = static_cast<Dtype>(known - kNames.begin());
  fields.each("shape", true, [&](const json::value& size, const std::string& where) {
    placed.tensor.shape.push_back(integer_of(size, where, fault));
  });
  std::vector<std::int64_t> offsets;
  fields.each("data_offsets", true, [&](const json::value& offset, const std::string& where) {
    offsets.push_back(integer_of(offset, where, fault));
  });
  fields.finish();
  if (offsets.size() != 2 || offsets[0] < 0 || offsets[1] < offsets[0]) fields.fail("data_offsets", "is no range");
  if (fault.empty()) placed.begin = static_cast<std::uint64_t>(offsets[0]);
  if (fault.empty()) placed.end = static_cast<std::uint64_t>(offsets[1]);
  return placed;
}

void check_metadata(const json::value& value, std::string& fault) {
  const auto* metadata = value.if_object();
  const auto is_text = [](const auto& item) { return item.value().is_string(); };
  const bool sound = metadata != nullptr && std::ranges::all_of(*metadata, is_text);
  if (!sound && fault.empty()) fault = "the metadata is no object of texts";
}

Result<std::vector<Placed>> parse(std::string_view header) {
  // A tensor has four colons, and some in its name: small objects cost most memory.
  if (std::ranges::count(header, ':') > std::ptrdiff_t{8 * kMaxTensors})
    return damaged("the safetensors header names too many tensors");
  const auto value = parse_json(header);
  if (!value) return damaged("the safetensors header is not valid: " + value.error().text);
  if (!value->is_object()) return damaged("the safetensors header is no object");
  if (value->get_object().size() > kMaxTensors + value->get_object().count("__metadata__"))
    return damaged("the safetensors header names too many tensors");
  std::vector<Placed> tensors;
  std::string fault;
  for (const auto& [key, item] : value->get_object()) {
    if (key == "__metadata__")
      check_metadata(item, fault);
    else
      tensors.push_back(read_placed(std::string(key), item, fault));
    if (!fault.empty()) return damaged("the safetensors header is not valid: " + fault);
  }
  std::sort(tensors.begin(), tensors.end(),
            [](const Placed& a, const Placed& b) { return std::pair(a.begin, a.end) < std::pair(b.begin, b.end); });
  return tensors;
}

// Sizes are multiplied in their order, as other readers do: a zero at the end does not undo an overflow.
std::optional<std::uint64_t> size_of(const StoredTensor& tensor) {
  std::int64_t bytes = static_cast<std::int64_t>(item_size(tensor.dtype));
  if (tensor.shape.size() > kMaxRank) return std::nullopt;
  for (const std::int64_t size : tensor.shape)
    if (size < 0 || __builtin_mul_overflow(bytes, size, &bytes) || bytes > kMaxBytes) return std::nullopt;
  return static_cast<std::uint64_t>(bytes);
}

// Tensors follow one another from the header to the end, without holes.
Result<StoredTensors> place(std::vector<Placed> tensors, std::span<std::byte> member, std::size_t header_size) {
  StoredTensors stored;
  const auto data = member.subspan(header_size);
  std::uint64_t at = 0;
  for (Placed& placed : tensors) {
    const auto size = size_of(placed.tensor);
    const bool fits = size && placed.begin == at && placed.end - placed.begin == *size && placed.end <= data.size();
    if (!fits) return damaged("tensor `" + placed.name + "` has a shape and offsets that do not fit");
    at = placed.end;
    if (placed.name.starts_with(".pad/")) continue;
    if ((header_size + placed.begin) % kAlignment != 0)
      return damaged("tensor `" + placed.name + "` does not start on a boundary of 64 bytes");
    placed.tensor.data = data.subspan(placed.begin, *size);
    stored.emplace(std::move(placed.name), std::move(placed.tensor));
  }
  if (at != data.size()) return damaged("bytes at the end belong to no tensor");
  return stored;
}

}  // namespace

Result<StoredTensors> read_tensors(std::span<std::byte> member) {
  std::uint64_t size = 0;
  if (member.size() < sizeof size) return damaged("the safetensors header is cut");
  std::memcpy(&size, member.data(), sizeof size);
  if (size > member.size() - sizeof size || size > kMaxTensorsHeader)
    return damaged("the safetensors header is cut or too large");
  auto tensors = parse({reinterpret_cast<const char*>(member.data()) + sizeof size, size});
  if (!tensors) return tensors.error();
  return place(std::move(*tensors), member, sizeof size + size);
}

std::string tensors_header(std::span<const OutputTensor> tensors) {
  json::object header;
  std::size_t at = 0;
  for (const OutputTensor& tensor : tensors) {
    header[tensor.name] = json::object{{"dtype", kNames[static_cast<std::size_t>(tensor.dtype)]},
                                       {"shape", json::value_from(tensor.shape)},
                                       {"data_offsets", json::array{at, at + tensor.data.size()}}};
    at += tensor.data.size();
  }
  const std::string text = json::serialize(header);
  std::string bytes(8, '\0');
  for (std::size_t i = 0; i < 8; ++i) bytes[i] = static_cast<char>(text.size() >> 8 * i & 0xff);
  return bytes + text;
}

}  // namespace mctl
