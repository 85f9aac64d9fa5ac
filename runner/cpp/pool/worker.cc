#include "pool/worker.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <exception>
#include <functional>
#include <new>
#include <numeric>
#include <optional>
#include <vector>

#include "format/layout.h"
#include "format/sha256.h"
#include "model/compare.h"
#include "model/loaded.h"
#include "pool/arena.h"
#include "pool/model_areas.h"
#include "pool/sandbox.h"

namespace mctl {
namespace {

constexpr std::uint64_t kWarmNs = 10'000'000'000;    // for warming up
constexpr std::uint64_t kWarmAgainNs = 500'000'000;  // if it takes a dead worker's place
constexpr std::uint64_t kWarmQuickNs = 25'000'000;   // if it is to be ready soon
constexpr std::uint64_t kLongNs = 100'000'000;       // of one run

std::uint64_t now_ns() {
  return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1));
}

template <std::size_t N>
void set_text(char (&target)[N], const std::string& text) {
  const std::size_t size = std::min(text.size(), N - 1);
  std::memcpy(target, text.data(), size);
  target[size] = '\0';
}

// Writes `count` elements of the value 1, or of the nearest one that is allowed: never a divisor of zero, nor a mask
// that hides everything.
void fill_ones(const Tensor& declared, const DimSizes& dims, std::span<std::byte> data) {
  const std::size_t item = item_size(declared.dtype);
  std::uint64_t bits = 1;
  if (declared.range) {
    const auto [low, high] = limits_of(declared, dims);
    bits = static_cast<std::uint64_t>(std::clamp<std::int64_t>(1, low, high));
  }
  switch (declared.dtype) {
    case Dtype::f16:
      bits = 0x3c00;
      break;
    case Dtype::bf16:
      bits = 0x3f80;
      break;
    case Dtype::f32:
      bits = 0x3f800000;
      break;
    case Dtype::f64:
      bits = 0x3ff0000000000000;
      break;
    default:
      break;
  }
  for (std::size_t at = 0; at + item <= data.size(); at += item) std::memcpy(data.data() + at, &bits, item);
}

class Worker {
 public:
  explicit Worker(const WorkerOptions& options) : options_(options) {}

  int run() {
    if (options_.sandbox && !options_.debuggable) hide_memory();
    if (auto ready = prepare(); !ready) return fail(ready.error());
    if (auto confined = confine(Stage::ready); !confined) return fail(confined.error());
    set_text(arena_->worker().note, notes_.substr(0, notes_.empty() ? 0 : notes_.size() - 1));
    enter(Phase::ready);
    serve();
    return 0;
  }

  int fail(const Error& error) {
    if (!arena_) return 1;  // there is no way to tell
    arena_->worker().code = static_cast<std::uint32_t>(error.code);
    set_text(arena_->worker().error, error.text);
    enter(Phase::failed);
    return 1;
  }

 private:
  // --- doorbells ----------------------------------------------------------------------------------------------------

  void ring() const {
    const std::uint64_t one = 1;
    while (write(options_.done_fd, &one, sizeof one) < 0 && errno == EINTR) {
    }
  }

  // False: nobody can ring any more.
  bool wait() const {
    std::uint64_t count = 0;
    for (;;) {
      const ssize_t got = read(options_.wake_fd, &count, sizeof count);
      if (got == sizeof count) return true;
      if (got == 0 || (errno != EAGAIN && errno != EINTR)) return false;
      pollfd bell{options_.wake_fd, POLLIN, 0};
      if (poll(&bell, 1, -1) < 0 && errno != EINTR) return false;
    }
  }

  void enter(Phase phase) {
    arena_->worker().phase.store(phase, std::memory_order_release);
    ring();
  }

  template <class Job>
  Status timed(Phase phase, Job job) {
    enter(phase);
    const std::uint64_t begin = now_ns();
    Status status = job();
    const auto index = static_cast<std::size_t>(phase) - static_cast<std::size_t>(Phase::verify);
    arena_->worker().seconds[index] = static_cast<double>(now_ns() - begin) * 1e-9;
    return status;
  }

  // --- before the first request -------------------------------------------------------------------------------------

  Status prepare() {
    if (auto opened = bundle_.open(options_.bundle_fd); !opened) return opened;
    const auto areas = model_areas(manifest_.contract, options_.max_rows);
    if (!areas) return areas.error();
    auto arena = Arena::attach(options_.arena_fd, *areas);
    if (!arena) return arena.error();
    arena_ = std::move(*arena);
    if (auto done = timed(Phase::verify, [&] { return bundle_.verify(options_.verify); }); !done) return done;
    if (auto done = timed(Phase::load, [&] { return load(); }); !done) return done;
    if (auto done = timed(Phase::warmup, [&] { return warm_up(); }); !done) return done;
    return timed(Phase::golden, [&] { return replay(); });
  }

  Status load() {
    return bundle_.load(options_.libtorch, options_.threads, [this] { return confine(Stage::loading); });
  }

  // What the kernel lacks, the operator hears of; a strict sandbox has to be whole.
  Status confine(Stage stage) {
    const std::string& folder = bundle_.code_folder();
    if (stage == Stage::loading && !folder.empty())
      notes_ += "note: code cannot be loaded from memory here, it went through `" + folder + "`\n";
    if (!options_.sandbox) return Done{};
    Confinement wanted{options_.strict};
    if (!folder.empty()) wanted.readable.push_back(folder);
    const Status confined = mctl::confine(stage, wanted);
    if (confined) return Done{};
    if (options_.strict) return Error{Code::host, "`--sandbox strict` is not possible here: " + confined.error().text};
    if (notes_.find("warning: ") == std::string::npos)
      notes_ += "warning: the workers have no sandbox: " + confined.error().text + "\n";
    return Done{};
  }

  // Each combination of buckets, the small ones first: one that is not reached in time is a little slower at its first
  // request. Each twice, as the first run is lazy initialisation and the second tells what it costs; a batch that takes
  // long needs no second one. None is begun that would be too late even if it took no longer than the one before.
  Status warm_up() {
    const std::uint64_t end = now_ns() + (options_.quick ? kWarmQuickNs : options_.replaces ? kWarmAgainNs : kWarmNs);
    std::uint64_t took = 0;
    for (const DimSizes& dims : warm_sizes()) {
      for (int slot = 0; slot < kSlots; ++slot)
        if (auto room = reserve(*arena_, slot, manifest_.contract, dims); !room) return room;
      const std::uint64_t begun = now_ns();
      if (begun + took > end) continue;
      bool taken = true;  // a model need not take ones, as offsets for example; whether it works the golden cases show
      for (int repeat = 0; repeat < 2 && (repeat == 0 || slot_ns(0) < kLongNs); ++repeat) {
        for (std::size_t i = 0; i < manifest_.contract.inputs.size(); ++i) {
          const auto bytes = bytes_of(manifest_.contract.inputs[i], dims);
          if (!bytes) return bytes.error();
          fill_ones(manifest_.contract.inputs[i], dims, arena_->input(0, i).first(*bytes));
        }
        if (auto ran = run_slot(0, *bundle_.variant(dims), dims); !ran) {
          if (ran.error().code != Code::model) return Error{ran.error().code, "warm-up failed: " + ran.error().text};
          taken = false;
          break;
        }
      }
      if (taken) report_warm(dims);
      took = now_ns() - begun;
    }
    bundle_.reset();
    return Done{};
  }

  void report_warm(const DimSizes& dims) {
    WorkerState& state = arena_->worker();
    if (state.warm_count + dims.size() + 1 > kMaxWarm) return;
    for (const std::int64_t size : dims) state.warm[state.warm_count++] = size;
    state.warm[state.warm_count++] = static_cast<std::int64_t>(slot_ns(0));
  }

  std::uint64_t slot_ns(int index) {
    const SlotState& slot = arena_->slot(index);
    return slot.ended_ns - slot.begun_ns;
  }

  // Every combination of the sizes that are served, by their products.
  std::vector<DimSizes> warm_sizes() {
    std::vector<DimSizes> sizes{{}};
    for (std::size_t dim = 0; dim < manifest_.contract.dims.size(); ++dim) {
      std::vector<DimSizes> longer;
      for (const DimSizes& shorter : sizes)
        for (const std::int64_t step : steps_of(dim)) {
          longer.push_back(shorter);
          longer.back().push_back(step);
        }
      sizes = std::move(longer);
    }
    const auto volume = [](const DimSizes& dims) {
      return std::accumulate(dims.begin(), dims.end(), 1.0, std::multiplies{});
    };
    std::ranges::stable_sort(sizes, {}, volume);
    return sizes;
  }

  // The buckets that fit the arena; a dim without buckets is at its smallest.
  std::vector<std::int64_t> steps_of(std::size_t index) {
    const Dim& dim = manifest_.contract.dims[index];
    const auto buckets = manifest_.buckets.find(dim.name);
    std::vector<std::int64_t> steps = buckets != manifest_.buckets.end() ? buckets->second : std::vector{dim.min};
    if (manifest_.contract.batch_dim != index) return steps;
    if (!options_.batch_sizes.empty()) steps = options_.batch_sizes;
    if (!options_.max_rows) return steps;
    const std::int64_t most = *options_.max_rows;
    std::erase_if(steps, [most](std::int64_t size) { return size > most; });
    if (steps.empty() || steps.back() != most) steps.push_back(most);
    return steps;
  }

  // The small cases first: large ones take their time. If this worker replaces one, they were right on this machine.
  Status replay() {
    std::vector<Golden> cases = manifest_.golden;
    std::ranges::stable_sort(cases, {}, [&](const Golden& golden) { return manifest_.members.at(golden.member).size; });
    std::vector<bool> seen(manifest_.variants.size());
    for (const Golden& golden : cases) {
      for (const std::size_t variant : covering(golden)) {
        if (options_.quick && seen[variant]) continue;
        if (auto same = replay(golden, variant); !same)
          return Error{same.error().code, "golden case `" + golden.name + "`: " + same.error().text};
        seen[variant] = true;
      }
      if (options_.replaces) break;
    }
    bundle_.reset();
    return Done{};
  }

  std::vector<std::size_t> covering(const Golden& golden) const {
    std::vector<std::size_t> variants;
    for (std::size_t i = 0; i < manifest_.variants.size(); ++i)
      if (covers(manifest_.variants[i], manifest_.contract, sizes_of(golden))) variants.push_back(i);
    return variants;
  }

  DimSizes sizes_of(const Golden& golden) const {
    DimSizes dims;
    for (const Dim& dim : manifest_.contract.dims) dims.push_back(golden.dims.at(dim.name));
    return dims;
  }

  // From the first state. The inputs are used where they are mapped, the outputs go to memory of their own: a case may
  // be larger than a slot.
  Status replay(const Golden& golden, std::size_t variant) {
    const auto mapping = bundle_.archive().map(golden.member, true);
    if (!mapping) return mapping.error();
    const auto tensors = read_tensors(mapping->bytes());
    if (!tensors) return tensors.error();
    const DimSizes dims = sizes_of(golden);
    std::vector<std::byte*> inputs;
    for (const Tensor& declared : manifest_.contract.inputs) {
      const auto tensor = stored(*tensors, "input." + declared.name, declared, dims);
      if (!tensor) return tensor.error();
      inputs.push_back(tensor->data.data());
    }
    std::vector<std::vector<std::byte>> memory;
    std::vector<std::span<std::byte>> outputs;
    for (const Tensor& declared : manifest_.contract.outputs) {
      const auto bytes = bytes_of(declared, dims);
      if (!bytes) return bytes.error();
      memory.emplace_back(*bytes);
    }
    for (auto& bytes : memory) outputs.emplace_back(bytes);
    bundle_.reset();
    if (auto ran = bundle_.run(variant, dims, inputs, outputs); !ran) return ran;
    return manifest_.contract.random ? Done{} : compare(*tensors, dims, outputs);
  }

  Status compare(const StoredTensors& tensors, const DimSizes& dims, std::span<const std::span<std::byte>> outputs) {
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      const Tensor& declared = manifest_.contract.outputs[i];
      const auto wanted = stored(tensors, "output." + declared.name, declared, dims);
      if (!wanted) return wanted.error();
      const auto tolerance = manifest_.tolerances.find(declared.name);
      const std::string text = difference(declared.dtype, outputs[i], wanted->data,
                                          tolerance != manifest_.tolerances.end() ? tolerance->second : Tolerance{});
      if (!text.empty()) return Error{Code::host, "output '" + declared.name + "' is not what eager gave: " + text};
    }
    return Done{};
  }

  Result<StoredTensor> stored(const StoredTensors& tensors, const std::string& name, const Tensor& declared,
                              const DimSizes& dims) const {
    const auto found = tensors.find(name);
    const auto shape = shape_of(declared, dims);
    if (!shape) return shape.error();
    if (found == tensors.end() || found->second.dtype != declared.dtype || found->second.shape != *shape)
      return Error{Code::damaged, "it has no tensor `" + name + "` as the contract says"};
    return found->second;
  }

  // --- requests -----------------------------------------------------------------------------------------------------

  void serve() {
    int next = 0;
    while (wait())
      while (answer_next(next)) {
      }
  }

  // Runs one slot that is ready, looking from `next` on: the front fills them in turn. False: there is none.
  bool answer_next(int& next) {
    for (int looked = 0; looked < kSlots; ++looked) {
      const int index = next;
      next = (next + 1) % kSlots;
      if (arena_->slot(index).phase.load(std::memory_order_acquire) != SlotPhase::ready) continue;
      answer(index, arena_->slot(index));
      return true;
    }
    return false;
  }

  void answer(int index, SlotState& slot) {
    slot.phase.store(SlotPhase::running, std::memory_order_relaxed);
    const DimSizes dims(slot.dims, slot.dims + manifest_.contract.dims.size());
    const Status ran = run_slot(index, slot.variant, dims);
    if (!ran) set_text(slot.error, ran.error().text);
    slot.phase.store(ran ? SlotPhase::done : SlotPhase::failed, std::memory_order_release);
    ring();
  }

  Status run_slot(int index, std::size_t variant, const DimSizes& dims) {
    std::vector<std::byte*> inputs;
    std::vector<std::span<std::byte>> outputs;
    for (std::size_t i = 0; i < manifest_.contract.inputs.size(); ++i) inputs.push_back(arena_->input(index, i).data());
    for (std::size_t i = 0; i < manifest_.contract.outputs.size(); ++i) outputs.push_back(arena_->output(index, i));
    SlotState& slot = arena_->slot(index);
    slot.begun_ns = now_ns();
    Status ran = bundle_.run(variant, dims, inputs, outputs);
    slot.ended_ns = now_ns();
    return ran;
  }

  WorkerOptions options_;
  Loaded bundle_;
  const Manifest& manifest_ = bundle_.manifest();
  std::optional<Arena> arena_;
  std::string notes_;  // lines for the operator
};

}  // namespace

int run_worker(const WorkerOptions& options) {
  Worker worker(options);
  try {
    return worker.run();
  } catch (const std::bad_alloc&) {
    return worker.fail({Code::host, "there is not enough memory for this model"});
  } catch (const std::exception& error) {
    return worker.fail({Code::internal, error.what()});
  }
}

}  // namespace mctl
