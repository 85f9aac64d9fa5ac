// A manifest's bytes: what is accepted can be used, and reads the same when it is written once more.
#include "format/manifest.h"

#include "check.h"
#include "doors/metadata.h"
#include "engine/packing.h"
#include "format/json.h"
#include "format/lookup.h"
#include "model/host.h"
#include "pool/arena.h"

namespace mctl {
namespace {

DimSizes ends_of(const Contract& contract, std::int64_t Dim::* end) {
  DimSizes sizes;
  for (const Dim& dim : contract.dims) sizes.push_back(dim.*end);
  return sizes;
}

Listed listed(const Manifest& manifest) { return {manifest.name, manifest.version, manifest, 1}; }

std::string metadata_of(const Manifest& manifest) {
  const std::string versions[] = {manifest.version};
  return model_metadata(listed(manifest), versions);
}

void use(const Manifest& manifest) {
  const Contract& contract = manifest.contract;
  for (const auto end : {&Dim::min, &Dim::max}) {
    const DimSizes sizes = ends_of(contract, end);
    const Lookup lookup(manifest, 2);
    require(lookup.variant(sizes).has_value(), "a variant covers each size of the contract");
    for (std::size_t d = 0; d < sizes.size(); ++d)
      for (const std::int64_t size : lookup.unpadded(d))
        require(contract.dims[d].min <= size && size <= contract.dims[d].max, "what is not padded is in range");
    const Packing packing(manifest);
    require(packing.sizes(sizes, packing.rows_of(sizes)).size() == sizes.size(), "a batch has a size for each dim");
    if (!packing.possible(sizes)) continue;
    for (const Tensor& tensor : contract.outputs) {
      const auto most = capacity_of(tensor, contract.dims);
      require(!most || *bytes_of(tensor, sizes) <= *most, "no output is larger than its capacity");
    }
  }
  for (const Golden& golden : manifest.golden)
    for (const Dim& dim : contract.dims) require(golden.dims.contains(dim.name), "a golden case has each dim");
  static const Host host = this_host();
  if (auto fits = check_host(manifest, host); !fits) require(!fits.error().text.empty(), "a refusal has a reason");
  require(static_cast<bool>(parse_json(metadata_of(manifest))), "the model's metadata is JSON");
  const Listed models[] = {listed(manifest)};
  for (const bool token : {false, true})
    require(static_cast<bool>(parse_json(front_page(models, "http://h", token, true))), "the front page is JSON");
}

void read(std::string_view text) {
  const auto manifest = parse_manifest(text);
  if (!manifest) return require(!manifest.error().text.empty(), "a refusal has a reason");
  use(*manifest);
  auto again = parse_manifest(boost::json::serialize(*parse_json(text)));
  if (again) again->digest = manifest->digest;  // of the bytes, which are others
  require(again && again->contract.dims.size() == manifest->contract.dims.size() &&
              metadata_of(*again) == metadata_of(*manifest) && again->members.size() == manifest->members.size(),
          "it reads the same when it is written once more");
}

}  // namespace
}  // namespace mctl

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  mctl::read({reinterpret_cast<const char*>(data), size});
  return 0;
}
