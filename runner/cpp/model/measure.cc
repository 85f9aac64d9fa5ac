#include "model/measure.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <boost/json/serialize.hpp>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iostream>
#include <vector>

#include "format/json.h"
#include "format/safetensors.h"
#include "model/loaded.h"

namespace mctl {
namespace {

namespace json = boost::json;
using Clock = std::chrono::steady_clock;

struct Ask {
  std::string tensors, variant, outputs;
  DimSizes dims;
  double seconds = 0;
  std::int64_t calls = 0;
  bool keep_state = false;
};

struct File {
  explicit File(const std::string& path) : fd(open_to_read(path)) {}
  ~File() { ::close(fd); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  const int fd;
};

class Bench {
 public:
  explicit Bench(const MeasureOptions& options) : options_(options), file_(options.bundle) {}

  Status load() {
    if (file_.fd < 0) return Error{Code::damaged, "cannot open `" + options_.bundle + "`: " + std::strerror(errno)};
    if (auto opened = bundle_.open(file_.fd); !opened) return opened;
    if (auto runs = bundle_.verify(false); !runs) return runs;
    return bundle_.load(options_.libtorch, options_.threads);
  }

  Result<std::vector<std::int64_t>> obey(const std::string& line) {
    const auto ask = read(line);
    if (!ask) return ask.error();
    const File file(ask->tensors);
    struct stat about{};
    if (file.fd < 0 || fstat(file.fd, &about) != 0) return Error{Code::usage, "cannot open `" + ask->tensors + "`"};
    const auto mapping = Mapping::of(file.fd, 0, static_cast<std::uint64_t>(about.st_size), true);
    if (!mapping) return mapping.error();
    auto tensors = read_tensors(mapping->bytes());
    if (!tensors) return tensors.error();
    return measure(*ask, *tensors);
  }

 private:
  Result<Ask> read(const std::string& line) const {
    const auto value = parse_json(line);
    if (!value) return value.error();
    std::string fault;
    Fields fields(*value, "ask", fault);
    Ask ask;
    ask.tensors = fields.text("tensors");
    ask.variant = fields.text("variant", false);
    ask.outputs = fields.text("outputs", false);
    ask.seconds = fields.number("seconds");
    ask.calls = fields.integer("calls");
    ask.keep_state = fields.text("state", false) == "kept";
    std::map<std::string, std::int64_t> sizes;
    fields.each_key("dims", true, [&](std::string name, const json::value& size, const std::string& where) {
      sizes[std::move(name)] = integer_of(size, where, fault);
    });
    fields.finish();
    for (const Dim& dim : manifest_.contract.dims) {
      const auto size = sizes.find(dim.name);
      ask.dims.push_back(size == sizes.end() ? 0 : size->second);
      if (ask.dims.back() < dim.min || ask.dims.back() > dim.max) fault = "no size of dim `" + dim.name + "`";
    }
    if (!fault.empty()) return Error{Code::usage, fault};
    return ask;
  }

  Result<std::vector<std::int64_t>> measure(const Ask& ask, const StoredTensors& tensors) {
    const auto variant = chosen(ask);
    if (!variant || !covers(manifest_.variants[*variant], manifest_.contract, ask.dims))
      return Error{Code::usage, "no variant `" + ask.variant + "` covers these sizes"};
    std::vector<std::byte*> inputs;
    for (const Tensor& declared : manifest_.contract.inputs) {
      const auto tensor = tensors.find("input." + declared.name);
      const auto bytes = bytes_of(declared, ask.dims);
      if (!bytes) return bytes.error();
      if (tensor == tensors.end() || tensor->second.dtype != declared.dtype || tensor->second.data.size() != *bytes)
        return Error{Code::usage, "no tensor for input `" + declared.name + "` at these sizes"};
      inputs.push_back(tensor->second.data.data());
    }
    std::vector<std::vector<std::byte>> memory;
    for (const Tensor& declared : manifest_.contract.outputs) {
      const auto bytes = bytes_of(declared, ask.dims);
      if (!bytes) return bytes.error();
      memory.emplace_back(*bytes);
    }
    const std::vector<std::span<std::byte>> outputs(memory.begin(), memory.end());
    if (!ask.keep_state) bundle_.reset();
    std::vector<std::int64_t> took;
    const auto until = Clock::now() + std::chrono::duration<double>(ask.seconds);
    do {
      const auto begun = Clock::now();
      if (auto ran = bundle_.run(*variant, ask.dims, inputs, outputs); !ran) return ran.error();
      took.push_back((Clock::now() - begun) / std::chrono::nanoseconds(1));
    } while (static_cast<std::int64_t>(took.size()) < ask.calls && Clock::now() < until);
    if (ask.outputs.empty()) return took;
    if (auto written = write(ask, memory); !written) return written.error();
    return took;
  }

  std::optional<std::size_t> chosen(const Ask& ask) const {
    if (ask.variant.empty()) return bundle_.variant(ask.dims);
    const auto named = std::ranges::find(manifest_.variants, ask.variant, &Variant::name);
    if (named == manifest_.variants.end()) return std::nullopt;
    return static_cast<std::size_t>(named - manifest_.variants.begin());
  }

  Status write(const Ask& ask, const std::vector<std::vector<std::byte>>& outputs) const {
    std::vector<OutputTensor> tensors;
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      const Tensor& declared = manifest_.contract.outputs[i];
      const auto shape = shape_of(declared, ask.dims);
      if (!shape) return shape.error();
      tensors.push_back({"output." + declared.name, declared.dtype, *shape, outputs[i]});
    }
    const std::string head = tensors_header(tensors);
    std::ofstream file(ask.outputs, std::ios::binary);
    file.write(head.data(), static_cast<std::streamsize>(head.size()));
    for (const OutputTensor& tensor : tensors)
      file.write(reinterpret_cast<const char*>(tensor.data.data()), static_cast<std::streamsize>(tensor.data.size()));
    if (!file.flush()) return Error{Code::host, "cannot write `" + ask.outputs + "`"};
    return Done{};
  }

  const MeasureOptions& options_;
  const File file_;
  Loaded bundle_;
  const Manifest& manifest_ = bundle_.manifest();
};

void answer(const json::object& object) { std::cout << json::serialize(object) << std::endl; }

json::object error_of(const Error& error) { return {{"error", error.text}}; }

}  // namespace

int run_measure(const MeasureOptions& options) {
  Bench bench(options);
  if (auto loaded = bench.load(); !loaded) {
    answer(error_of(loaded.error()));
    return 1;
  }
  answer({{"ready", true}});
  for (std::string line; std::getline(std::cin, line);) {
    const auto took = bench.obey(line);
    answer(took ? json::object{{"ns", json::value_from(*took)}} : error_of(took.error()));
  }
  return 0;
}

}  // namespace mctl
