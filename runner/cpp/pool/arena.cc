#include "pool/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "format/text.h"
#include "model/unnamed_file.h"

namespace mctl {
namespace {

static_assert(std::atomic<Phase>::is_always_lock_free && std::atomic<SlotPhase>::is_always_lock_free,
              "two processes share them");

constexpr std::size_t kPage = 4096;

Error no_room(const std::string& why) {
  return {Code::host, "no room for the model's largest batch: " + why + "; choose a smaller `--max-batch-size`"};
}

// Takes pages now: one that is not there when it is touched ends the process.
Status take_pages(int fd, std::size_t offset, std::size_t bytes) {
  int error;
  do error = posix_fallocate(fd, static_cast<off_t>(offset), static_cast<off_t>(bytes));
  while (error == EINTR);
  if (error != 0) return no_room(std::strerror(error));
  return Done{};
}

constexpr double kLongestPhase = 1e6;  // seconds

// One reading of shared memory.
template <class T>
T fetch(const T& shared) {
  T copy;
  __atomic_load(&shared, &copy, __ATOMIC_RELAXED);
  return copy;
}

// A text of a worker, as lines that a terminal and JSON can show.
template <std::size_t N>
std::string text_of(const char (&shared)[N]) {
  std::string text;
  for (const char& shared_byte : shared) {
    const char byte = fetch(shared_byte);
    if (byte == '\0') break;
    text += byte;
  }
  const bool unicode = is_utf8(text);
  for (char& byte : text) {
    const auto value = static_cast<unsigned char>(byte);
    if ((value < 0x20 && byte != '\n') || value == 0x7f || (value > 0x7f && !unicode)) byte = '?';
  }
  return text;
}

// Of those that a worker fails with.
Code code_of(std::uint32_t number) {
  for (const Code code : {Code::damaged, Code::model, Code::internal})
    if (number == static_cast<std::uint32_t>(code)) return code;
  return Code::host;
}

constexpr std::size_t kHeader = (sizeof(WorkerState) + kPage - 1) / kPage * kPage;

// Adds `bytes`, rounded up to pages, to `total`.
bool grow(std::size_t& total, std::size_t bytes) {
  std::size_t rounded;
  if (__builtin_add_overflow(bytes, kPage - 1, &rounded)) return false;
  return !__builtin_add_overflow(total, rounded / kPage * kPage, &total);
}

}  // namespace

Arena::~Arena() {
  if (base_ != nullptr) munmap(base_, size_);
  if (fd_ >= 0) close(fd_);
}

void Arena::swap(Arena& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(base_, other.base_);
  std::swap(size_, other.size_);
  std::swap(slot_bytes_, other.slot_bytes_);
  std::swap(inputs_, other.inputs_);
  std::swap(outputs_, other.outputs_);
  std::swap(folder_, other.folder_);
}

Status Arena::lay_out(const Areas& areas) {
  bool fits = grow(slot_bytes_, sizeof(SlotState));
  const auto place = [&](const std::vector<std::size_t>& sizes, std::vector<Area>& placed) {
    for (const std::size_t bytes : sizes) {
      placed.push_back({slot_bytes_, bytes, {}});
      fits = fits && grow(slot_bytes_, bytes);
    }
  };
  place(areas.inputs, inputs_);
  place(areas.outputs, outputs_);
  size_ = kHeader;
  for (int slot = 0; slot < kSlots; ++slot) fits = fits && grow(size_, slot_bytes_);
  if (!fits || size_ > PTRDIFF_MAX) return no_room("it has more bytes than 63 bits can count");
  return Done{};
}

Status Arena::map() {
  void* base = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd_, 0);
  if (base == MAP_FAILED) return no_room(std::strerror(errno));
  base_ = static_cast<std::byte*>(base);
  return Done{};
}

// Sealed, so that a worker cannot cut it and kill the front with a page that is not there. In a folder, where there are
// no seals, all pages are taken: its disk may be small.
Status Arena::set_size(const UnnamedFile& file) const {
  if (ftruncate(file.fd, static_cast<off_t>(size_)) != 0) return Error{Code::host, std::strerror(errno)};
  if (!file.folder.empty()) return take_pages(file.fd, 0, size_);
  if (fcntl(file.fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
    return Error{Code::host, std::strerror(errno)};
  if (auto taken = take_pages(file.fd, 0, kHeader); !taken) return taken;
  for (int slot = 0; slot < kSlots; ++slot)
    if (auto taken = take_pages(file.fd, slot_offset(slot), sizeof(SlotState)); !taken) return taken;
  return Done{};
}

Status Arena::reserve(int slot, Area& area, std::size_t bytes) {
  std::size_t& reserved = area.reserved[slot];
  if (bytes <= reserved) return Done{};
  if (auto taken = take_pages(fd_, slot_offset(slot) + area.offset + reserved, bytes - reserved); !taken) return taken;
  reserved = bytes;
  return Done{};
}

Result<Arena> Arena::create(const Areas& areas) {
  Arena arena;
  if (auto laid = arena.lay_out(areas); !laid) return laid.error();
  const auto file = unnamed_file("mctl-arena", [&](const UnnamedFile& made) { return arena.set_size(made); });
  if (!file) return no_room(file.error().text);
  arena.fd_ = file->fd;
  arena.folder_ = file->folder;
  if (auto mapped = arena.map(); !mapped) return mapped.error();
  return arena;
}

Result<Arena> Arena::attach(int fd, const Areas& areas) {
  Arena arena;
  arena.fd_ = fd;
  if (auto laid = arena.lay_out(areas); !laid) return laid.error();
  struct stat status;
  if (fstat(fd, &status) != 0 || static_cast<std::size_t>(status.st_size) != arena.size_)
    return Error{Code::internal, "the arena was made for another contract"};
  if (auto mapped = arena.map(); !mapped) return mapped.error();
  return arena;
}

std::size_t Arena::slot_offset(int slot) const { return kHeader + static_cast<std::size_t>(slot) * slot_bytes_; }

std::byte* Arena::slot_base(int slot) const { return base_ + slot_offset(slot); }

WorkerState& Arena::worker() { return *reinterpret_cast<WorkerState*>(base_); }

SlotState& Arena::slot(int index) { return *reinterpret_cast<SlotState*>(slot_base(index)); }

WorkerReport Arena::report() const {
  const auto& state = *reinterpret_cast<const WorkerState*>(base_);
  WorkerReport report;
  report.phase = std::min(state.phase.load(std::memory_order_acquire), Phase::failed);
  for (std::size_t i = 0; i < report.seconds.size(); ++i) {
    const double seconds = fetch(state.seconds[i]);
    report.seconds[i] = seconds >= 0 && seconds < kLongestPhase ? seconds : 0;  // false for NaN
  }
  const std::size_t count = std::min<std::size_t>(fetch(state.warm_count), kMaxWarm);
  for (std::size_t i = 0; i < count; ++i) report.warm.push_back(fetch(state.warm[i]));
  report.error = {code_of(fetch(state.code)), text_of(state.error)};
  report.note = text_of(state.note);
  return report;
}

SlotReport Arena::report(int slot) const {
  const auto& state = *reinterpret_cast<const SlotState*>(slot_base(slot));
  SlotReport report;
  if (const SlotPhase phase = state.phase.load(std::memory_order_acquire); phase <= SlotPhase::failed)
    report.phase = phase;
  const auto now = std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
  const auto not_later = [](std::uint64_t time, std::int64_t limit) {
    return static_cast<std::int64_t>(std::min(time, static_cast<std::uint64_t>(limit)));
  };
  report.begun_ns = not_later(state.begun_ns.load(std::memory_order_relaxed), now);
  report.ended_ns = std::max(report.begun_ns, not_later(fetch(state.ended_ns), now));
  return report;
}

std::string Arena::error(int slot) const { return text_of(reinterpret_cast<const SlotState*>(slot_base(slot))->error); }

std::span<std::byte> Arena::input(int slot, std::size_t index) {
  return {slot_base(slot) + inputs_[index].offset, inputs_[index].bytes};
}

std::span<std::byte> Arena::output(int slot, std::size_t index) {
  return {slot_base(slot) + outputs_[index].offset, outputs_[index].bytes};
}

}  // namespace mctl
