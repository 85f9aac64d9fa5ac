#include "format/manifest.h"

#include <algorithm>
#include <set>
#include <tuple>

#include "format/contract_json.h"
#include "format/json.h"
#include "format/layout.h"
#include "format/sha256.h"
#include "format/text.h"

namespace mctl {
namespace {

namespace json = boost::json;

constexpr std::int64_t kMaxThreads = 4096;

std::vector<std::string> read_texts(Fields& fields, std::string_view name, bool required, std::string& fault) {
  std::vector<std::string> texts;
  fields.each(name, required,
              [&](const json::value& item, const std::string& at) { texts.push_back(text_of(item, at, fault)); });
  return texts;
}

// Returns the version of torch.
std::string read_producer(const json::value& value, const std::string& where, std::string& fault) {
  Fields fields(value, where, fault);
  fields.text("mctl");
  const std::string torch = fields.text("torch");
  for (const auto* name : {"torch_git", "python", "compiler"}) fields.text(name, false);
  read_texts(fields, "flags", false, fault);
  fields.finish();
  return torch;
}

void read_source(const json::value& value, std::string& fault) {
  Fields fields(value, "source", fault);
  for (const auto* name : {"file", "sha256", "model"}) fields.text(name);
  fields.integer("seed");
  for (const auto* name : {"weights", "weights_sha256"}) fields.text(name, false);
  fields.finish();
}

Target read_target(const json::value& value, std::string& fault) {
  Fields fields(value, "target", fault);
  Target target;
  target.os = fields.word("os", {"linux", "darwin", "windows"});
  target.arch = fields.word("arch", {"x86_64", "aarch64", "arm64"});
  target.isa = fields.word("isa", {"x86-64-v2", "x86-64-v3", "x86-64-v4", "aarch64"});
  target.device = fields.find("device", false) != nullptr ? fields.word("device", {"cpu"}) : "cpu";
  target.features = read_texts(fields, "features", false, fault);
  target.glibc = fields.text("glibc", false);
  target.glibcxx = fields.text("glibcxx", false);
  fields.finish();
  return target;
}

// Sizes, strides or numbers of elements.
std::vector<std::int64_t> counts_of(const json::value& value, const std::string& where, std::string& fault) {
  const auto counts = integers_of(value, where, fault);
  if (fault.empty() && std::ranges::any_of(counts, [](std::int64_t count) { return count < 0; }))
    fault = where + " has a negative number";
  return counts;
}

ConstantRef read_constant_ref(const json::value& value, const std::string& where, std::string& fault) {
  Fields fields(value, where, fault);
  ConstantRef constant;
  constant.tensor = fields.text("tensor");
  if (const auto* stride = fields.nullable("stride")) constant.stride = counts_of(*stride, where + ".stride", fault);
  constant.state = fields.boolean("state", false);
  fields.finish();
  return constant;
}

std::pair<std::int64_t, std::int64_t> pair_of(const json::value& value, const std::string& where, std::string& fault) {
  const auto ends = counts_of(value, where, fault);
  if (ends.size() == 2) return {ends[0], ends[1]};
  if (fault.empty()) fault = where + " is no pair";
  return {0, 0};
}

Variant read_variant(const json::value& value, const std::string& where, std::string& fault) {
  Fields fields(value, where, fault);
  Variant variant;
  variant.name = fields.text("name");
  variant.library = fields.text("library");
  fields.each_key("covers", true, [&](std::string key, const json::value& item, const std::string& at) {
    variant.covers[std::move(key)] = pair_of(item, at, fault);
  });
  fields.each_key("constants", true, [&](std::string key, const json::value& item, const std::string& at) {
    variant.constants[std::move(key)] = read_constant_ref(item, at, fault);
  });
  variant.imports = read_texts(fields, "imports", true, fault);
  const std::int64_t threads = fields.integer("threads", 0);
  if (threads < 0 || threads > kMaxThreads) fields.fail("threads", "is no number in 0.." + std::to_string(kMaxThreads));
  variant.threads = static_cast<int>(threads);
  variant.bf16 = fields.boolean("bf16", false);
  if (fields.integer("tuning_ms", 0) < 0) fields.fail("tuning_ms", "is negative");
  fields.each_key("callers", false,
                  [&](const auto&, const json::value& item, const std::string& at) { texts_of(item, at, fault); });
  fields.finish();
  return variant;
}

OperatorLibrary read_library(const json::value& value, const std::string& where, std::string& fault) {
  Fields fields(value, where, fault);
  OperatorLibrary library{fields.text("member"), read_texts(fields, "operators", true, fault)};
  fields.finish();
  return library;
}

Handler read_handler(const json::value& value, std::string& fault) {
  Fields fields(value, "handler", fault);
  Handler handler{fields.text("source"), read_texts(fields, "assets", false, fault), fields.text("golden", false)};
  read_texts(fields, "requirements", false, fault);
  fields.text("python", false);
  fields.finish();
  return handler;
}

Golden read_golden(const json::value& value, const std::string& where, std::string& fault) {
  Fields fields(value, where, fault);
  Golden golden{fields.text("name"), fields.text("member"), {}};
  fields.each_key("dims", true, [&](std::string key, const json::value& item, const std::string& at) {
    golden.dims[std::move(key)] = integer_of(item, at, fault);
  });
  fields.finish();
  return golden;
}

std::int64_t read_threads(Fields& fields) {
  const std::int64_t threads = fields.integer("threads");
  if (threads < 1 || threads > kMaxThreads) fields.fail("threads", "is not in 1.." + std::to_string(kMaxThreads));
  return threads;
}

Measured read_measured(const json::value& value, const std::string& where, std::string& fault) {
  Fields fields(value, where, fault);
  Measured measured{{}, read_threads(fields), fields.integer("median_us")};
  fields.each_key("dims", true, [&](std::string key, const json::value& item, const std::string& at) {
    measured.dims[std::move(key)] = integer_of(item, at, fault);
  });
  if (measured.median_us < 0) fields.fail("median_us", "is negative");
  fields.finish();
  return measured;
}

Choice read_choice(const json::value& value, const std::string& where, std::string& fault) {
  Fields fields(value, where, fault);
  Choice choice{{}, read_threads(fields), fields.text("variant"), fields.boolean("pad", true)};
  fields.each_key("dims", true, [&](std::string key, const json::value& item, const std::string& at) {
    choice.dims[std::move(key)] = integer_of(item, at, fault);
  });
  fields.finish();
  return choice;
}

// A timing is a choice's place and a time; only that it is sound matters here.
Choice read_timing(const json::value& value, const std::string& where, std::string& fault) {
  Fields fields(value, where, fault);
  Choice timing{{}, read_threads(fields), fields.text("variant")};
  fields.each_key("dims", true, [&](std::string key, const json::value& item, const std::string& at) {
    timing.dims[std::move(key)] = integer_of(item, at, fault);
  });
  if (fields.integer("median_ns") < 0) fields.fail("median_ns", "is negative");
  fields.finish();
  return timing;
}

void read_machine(const json::value& value, std::string& fault) {
  Fields fields(value, "tuning.machine", fault);
  fields.text("cpu");
  const std::int64_t cores = fields.integer("cores");
  if (cores < 1 || cores > kMaxThreads) fields.fail("cores", "is not in 1.." + std::to_string(kMaxThreads));
  fields.text("isa", false);
  fields.finish();
}

Tuning read_tuning(const json::value& value, std::string& fault) {
  Fields fields(value, "tuning", fault);
  Tuning tuning;
  if (const auto* machine = fields.find("machine")) read_machine(*machine, fault);
  if (fields.number("noise") < 0) fields.fail("noise", "is negative");
  tuning.threads = fields.integer("threads", 0);
  if (tuning.threads < 0 || tuning.threads > kMaxThreads)
    fields.fail("threads", "is no number in 0.." + std::to_string(kMaxThreads));
  if (fields.integer("total_ms", 0) < 0) fields.fail("total_ms", "is negative");
  fields.each("choices", true, [&](const json::value& item, const std::string& at) {
    tuning.choices.push_back(read_choice(item, at, fault));
  });
  fields.each("timings", false, [&](const json::value& item, const std::string& at) {
    tuning.timings.push_back(read_timing(item, at, fault));
  });
  fields.finish();
  return tuning;
}

Tolerance read_tolerance(const json::value& value, const std::string& where, std::string& fault) {
  Fields fields(value, where, fault);
  const Tolerance tolerance{fields.number("rtol"), fields.number("atol")};
  fields.finish();
  return tolerance;
}

Member read_member(const json::value& value, const std::string& where, std::string& fault) {
  Fields fields(value, where, fault);
  const std::int64_t size = fields.integer("size");
  if (size < 0) fields.fail("size", "is negative");
  Member member{static_cast<std::uint64_t>(size), fields.text("sha256")};
  const auto is_digit = [](char c) { return ('0' <= c && c <= '9') || ('a' <= c && c <= 'f'); };
  if (member.sha256.size() != 64 || !std::ranges::all_of(member.sha256, is_digit))
    fields.fail("sha256", "is no SHA-256 in hexadecimal digits");
  fields.finish();
  return member;
}

void read_record(Fields& fields, Manifest& manifest, std::string& fault) {
  fields.text("created");
  if (const auto* producer = fields.find("producer")) manifest.torch = read_producer(*producer, "producer", fault);
  if (const auto* exporter = fields.nullable("exporter")) read_producer(*exporter, "exporter", fault);
  if (const auto* source = fields.find("source")) read_source(*source, fault);
  if (fields.nullable("parity") != nullptr) fields.word("parity", {"pass", "skipped"});
  manifest.standalone = fields.boolean("standalone", false);
  manifest.needs = read_texts(fields, "needs", false, fault);
  fields.each_key("preprocessing", false, [](const auto&...) {});
  read_texts(fields, "notes", false, fault);
}

Manifest read_manifest(const json::value& value, std::string& fault) {
  Fields fields(value, "manifest", fault);
  Manifest manifest;
  fields.text("schema");
  manifest.name = fields.text("name");
  manifest.version = fields.text("version");
  read_record(fields, manifest, fault);
  if (const auto* contract = fields.find("contract")) manifest.contract = contract_from_json(*contract, fault);
  if (const auto* target = fields.find("target")) manifest.target = read_target(*target, fault);
  fields.each_key("buckets", false, [&](std::string key, const json::value& item, const std::string& at) {
    manifest.buckets[std::move(key)] = counts_of(item, at, fault);
  });
  fields.each("libraries", false, [&](const json::value& item, const std::string& at) {
    manifest.libraries.push_back(read_library(item, at, fault));
  });
  fields.each("variants", true, [&](const json::value& item, const std::string& at) {
    manifest.variants.push_back(read_variant(item, at, fault));
  });
  fields.each("golden", true, [&](const json::value& item, const std::string& at) {
    manifest.golden.push_back(read_golden(item, at, fault));
  });
  fields.each("curve", false, [&](const json::value& item, const std::string& at) {
    manifest.curve.push_back(read_measured(item, at, fault));
  });
  if (const auto* tuning = fields.nullable("tuning")) manifest.tuning = read_tuning(*tuning, fault);
  if (const auto* handler = fields.nullable("handler")) manifest.handler = read_handler(*handler, fault);
  fields.each_key("tolerances", true, [&](std::string key, const json::value& item, const std::string& at) {
    manifest.tolerances[std::move(key)] = read_tolerance(item, at, fault);
  });
  fields.each_key("members", true, [&](std::string key, const json::value& item, const std::string& at) {
    manifest.members[std::move(key)] = read_member(item, at, fault);
  });
  fields.finish();
  return manifest;
}

// --- is it sound? ---------------------------------------------------------------------------------------------------

const Dim* find_dim(const Contract& contract, std::string_view name) {
  const auto found =
      std::find_if(contract.dims.begin(), contract.dims.end(), [&](const Dim& dim) { return dim.name == name; });
  return found != contract.dims.end() ? &*found : nullptr;
}

bool allows(const Dim& dim, std::int64_t size) {
  return dim.min <= size && size <= dim.max && size % dim.multiple == 0;
}

Status check_listed(const Manifest& manifest, const std::string& path, const std::string& folder) {
  if (manifest.members.contains(path) && path.starts_with(folder)) return Done{};
  return damaged("the manifest names `" + path + "`, which is not a member listed under `" + folder + "`");
}

Status check_sizes(const Manifest& manifest, const std::map<std::string, std::int64_t>& dims,
                   const std::string& where) {
  bool sound = dims.size() == manifest.contract.dims.size();
  for (const Dim& dim : manifest.contract.dims) {
    const auto size = dims.find(dim.name);
    sound = sound && size != dims.end() && allows(dim, size->second);
  }
  if (!sound) return damaged(where + " does not give each dim a size inside its range");
  return Done{};
}

Status check_golden(const Manifest& manifest, const Golden& golden) {
  if (auto sizes = check_sizes(manifest, golden.dims, "golden case `" + golden.name + "`"); !sizes) return sizes;
  return check_listed(manifest, golden.member, std::string(kGolden));
}

Status check_variant(const Manifest& manifest, const Variant& variant) {
  const std::string where = "variant `" + variant.name + "`";
  if (variant.covers.size() != manifest.contract.dims.size())
    return damaged(where + " does not say which sizes of each dim it covers");
  for (const auto& [name, range] : variant.covers) {
    const Dim* dim = find_dim(manifest.contract, name);
    if (dim == nullptr || range.first < dim->min || range.first > range.second || range.second > dim->max)
      return damaged(where + " covers sizes of dim `" + name + "` outside its range");
  }
  if (!variant.constants.empty() && !manifest.members.contains(kWeights))
    return damaged(where + " has constants, but the manifest lists no `" + std::string(kWeights) + "`");
  return check_listed(manifest, variant.library, std::string(kVariants) + variant.name + "/");
}

// `points` of the tuning have sizes that their variants cover, and none is there twice.
Status check_points(const Manifest& manifest, const std::vector<Choice>& points, const std::string& what,
                    bool one_variant) {
  std::set<std::tuple<std::map<std::string, std::int64_t>, std::int64_t, std::string>> seen;
  for (const Choice& point : points) {
    if (auto sizes = check_sizes(manifest, point.dims, what); !sizes) return sizes;
    const auto variant = std::ranges::find(manifest.variants, point.variant, &Variant::name);
    const auto covered = [&](const auto& dim) {
      const auto& range = variant->covers.at(dim.first);
      return range.first <= dim.second && dim.second <= range.second;
    };
    if (variant == manifest.variants.end() || !std::ranges::all_of(point.dims, covered))
      return damaged(what + " names the variant `" + point.variant + "`, which does not cover its sizes");
    if (!seen.emplace(point.dims, point.threads, one_variant ? "" : point.variant).second)
      return damaged(what + " is there twice");
  }
  return Done{};
}

// Each name is a part of its member's path.
template <class Items>
Status check_names(const std::string& what, const Items& items) {
  std::set<std::string_view> seen;
  for (const auto& item : items) {
    const bool plain = path_fault(item.name).empty() && item.name.find('/') == std::string::npos;
    if (!plain || !seen.insert(item.name).second)
      return damaged("the name of " + what + " `" + item.name + "` is not allowed, or there twice");
  }
  return Done{};
}

Status check_members(const Manifest& manifest) {
  for (const auto& [path, member] : manifest.members)
    if (const std::string fault = path_fault(path); !fault.empty())
      return damaged("the manifest names the path `" + path + "`, which is not allowed: " + fault);
  return Done{};
}

bool covers_all(const Contract& contract, const Variant& variant) {
  return std::all_of(contract.dims.begin(), contract.dims.end(),
                     [&](const Dim& dim) { return variant.covers.at(dim.name) == std::pair(dim.min, dim.max); });
}

Status check_buckets(const Manifest& manifest) {
  for (const auto& [name, sizes] : manifest.buckets) {
    const Dim* dim = find_dim(manifest.contract, name);
    const bool ascending = std::adjacent_find(sizes.begin(), sizes.end(), std::greater_equal()) == sizes.end();
    const auto inside = [&](std::int64_t size) { return allows(*dim, size); };
    if (dim == nullptr || !ascending || !std::all_of(sizes.begin(), sizes.end(), inside))
      return damaged("the buckets of dim `" + name + "` are not ascending sizes inside its range");
    if (sizes.empty() || sizes.back() != dim->max)
      return damaged("the buckets of dim `" + name + "` do not end with its maximum, " + std::to_string(dim->max));
  }
  return Done{};
}

Status check_tolerances(const Manifest& manifest) {
  for (const auto& [name, tolerance] : manifest.tolerances) {
    const bool known = std::ranges::count(manifest.contract.outputs, name, &Tensor::name) > 0;
    if (!known || tolerance.rtol < 0 || tolerance.atol < 0)
      return damaged("the tolerance of output `" + name + "` is not sound");
  }
  return Done{};
}

Status check_handler(const Manifest& manifest) {
  if (!manifest.handler) return Done{};
  std::vector<std::string> named = manifest.handler->assets;
  if (!manifest.handler->is_stock()) named.push_back(manifest.handler->source);
  if (!manifest.handler->golden.empty()) named.push_back(manifest.handler->golden);
  for (const std::string& member : named)
    if (auto listed = check_listed(manifest, member, std::string(kHandler)); !listed) return listed;
  if (std::ranges::count(manifest.needs, "handler") == 0)
    return damaged("the manifest has a handler, which is no need of it");
  return Done{};
}

Status check_sound(const Manifest& manifest) {
  if (!is_name(manifest.name) || !is_name(manifest.version))
    return damaged("name and version of the manifest have letters, digits, `_`, `.` and `-` only");
  if (auto contract = validate(manifest.contract); !contract) return contract;
  if (auto members = check_members(manifest); !members) return members;
  if (auto names = check_names("golden case", manifest.golden); !names) return names;
  if (auto names = check_names("variant", manifest.variants); !names) return names;
  for (const OperatorLibrary& library : manifest.libraries)
    if (auto listed = check_listed(manifest, library.member, std::string(kLibraries)); !listed) return listed;
  if (!manifest.libraries.empty() && std::ranges::count(manifest.needs, "libraries") == 0)
    return damaged("the manifest lists libraries, which are no need of it");
  if (auto sound = check_handler(manifest); !sound) return sound;
  for (const Golden& golden : manifest.golden)
    if (auto sound = check_golden(manifest, golden); !sound) return sound;
  for (const Measured& point : manifest.curve)
    if (auto sound = check_sizes(manifest, point.dims, "a point of the curve"); !sound) return sound;
  for (const Variant& variant : manifest.variants)
    if (auto sound = check_variant(manifest, variant); !sound) return sound;
  const auto whole = [&](const Variant& variant) { return covers_all(manifest.contract, variant); };
  if (std::none_of(manifest.variants.begin(), manifest.variants.end(), whole))
    return damaged("no variant covers the whole contract");
  if (manifest.tuning) {
    if (auto sound = check_points(manifest, manifest.tuning->choices, "a choice", true); !sound) return sound;
    if (auto sound = check_points(manifest, manifest.tuning->timings, "a timing", false); !sound) return sound;
  }
  if (auto buckets = check_buckets(manifest); !buckets) return buckets;
  return check_tolerances(manifest);
}

// The text at a JSON pointer of two levels at most; empty if there is none.
std::string text_at(const json::value& value, std::string_view pointer) {
  boost::system::error_code none;
  const auto* found = value.find_pointer(pointer, none);
  return found != nullptr && found->is_string() ? std::string(found->get_string()) : "";
}

Error unknown_need(const json::value& manifest, std::string_view need) {
  const std::string maker = text_at(manifest, "/producer/mctl");
  return damaged("it needs `" + std::string(need.substr(0, 64)) +
                 "`, which this mctl does not have: it was made by mctl " + maker.substr(0, 32) +
                 ", use that one or a newer one");
}

// A manifest with a need that is not known may hold anything else: this is looked at first.
Status check_needs(const json::value& manifest, bool may_need) {
  const auto* needs = manifest.get_object().if_contains("needs");
  if (needs == nullptr) return Done{};
  if (!may_need) return damaged("the manifest is not valid: only `" + std::string(kNeedingSchema) + "` has `needs`");
  if (!needs->is_array()) return Done{};  // read_manifest says so
  for (const auto& need : needs->get_array())
    if (need.is_string() && std::ranges::count(kNeeds, std::string_view(need.get_string())) == 0)
      return unknown_need(manifest, need.get_string());
  return Done{};
}

Status check_head(const json::value& value) {
  const std::string schema = text_at(value, "/schema");
  if (schema.empty()) return damaged("it has no schema");
  if (schema == kBundleSchema || schema == kNeedingSchema) return check_needs(value, schema == kNeedingSchema);
  if (schema == kProgramSchema)
    return Error{Code::usage, "it is a program, not a bundle: run `mctl compile` on it, and serve what that writes"};
  return damaged("it has the unknown manifest schema `" + schema.substr(0, 64) +
                 "`: it was made by another version of mctl");
}

}  // namespace

Result<Manifest> parse_manifest(std::string_view text) {
  if (text.size() > kMaxManifest) return damaged("the manifest has " + std::to_string(text.size()) + " bytes");
  if (std::ranges::count_if(text, [](char c) { return c == '{' || c == '['; }) > std::ptrdiff_t{kMaxJsonParts})
    return damaged("the manifest has more than " + std::to_string(kMaxJsonParts) + " objects and lists");
  const auto value = parse_json(text);
  if (!value) return damaged("the manifest is not valid: " + value.error().text);
  if (auto head = check_head(*value); !head) return head.error();
  std::string fault;
  Manifest manifest = read_manifest(*value, fault);
  if (!fault.empty()) return damaged("the manifest is not valid: " + fault);
  if (auto sound = check_sound(manifest); !sound) return damaged("the manifest is not valid: " + sound.error().text);
  manifest.digest = sha256(std::as_bytes(std::span(text)));
  return manifest;
}

bool covers(const Variant& variant, const Contract& contract, std::span<const std::int64_t> dims) {
  for (std::size_t i = 0; i < dims.size(); ++i) {
    const auto range = variant.covers.find(contract.dims[i].name);
    if (range != variant.covers.end() && (dims[i] < range->second.first || dims[i] > range->second.second))
      return false;
  }
  return true;
}

}  // namespace mctl
