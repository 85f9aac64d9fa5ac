#include "tensor.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <mutex>

namespace mctl::shim {
namespace {

// A place for a tensor. Its address plus its generation is the handle: the next tensor in the same place has another.
struct alignas(512) Slot {
  Tensor tensor;
  Slot* next;                // of the free ones
  std::uint32_t generation;  // below sizeof(Slot)
  bool taken;
};
static_assert(sizeof(Slot) == 512);

// All places lie in one range of addresses, of which the system gives memory to those that are used.
class Slots {
 public:
  Slot* find(Handle handle) const {
    const auto at = reinterpret_cast<std::uintptr_t>(handle) - reinterpret_cast<std::uintptr_t>(slots_);
    if (slots_ == nullptr || at >= kCount * sizeof(Slot)) return nullptr;
    Slot* slot = slots_ + at / sizeof(Slot);
    return slot->taken && slot->generation == at % sizeof(Slot) ? slot : nullptr;
  }

  Handle take(const Tensor& tensor) {
    const std::lock_guard lock(mutex_);
    if (slots_ == nullptr && !reserve()) return nullptr;
    Slot* slot = free_;
    if (slot != nullptr)
      free_ = slot->next;
    else if (used_ < kCount)
      slot = slots_ + used_++;
    if (slot == nullptr) {
      fail("there are more than %zu tensors", kCount);
      return nullptr;
    }
    slot->tensor = tensor;
    slot->taken = true;
    ++live_;
    return reinterpret_cast<char*>(slot) + slot->generation;
  }

  void give_back(Slot* slot) {
    const std::lock_guard lock(mutex_);
    slot->taken = false;
    slot->generation = (slot->generation + 1) % sizeof(Slot);
    slot->next = free_;
    free_ = slot;
    --live_;
  }

  std::size_t live() {
    const std::lock_guard lock(mutex_);
    return live_;
  }

 private:
  static constexpr std::size_t kCount = 1 << 16;

  bool reserve() {
    void* range = mmap(nullptr, kCount * sizeof(Slot), PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (range == MAP_FAILED) return fail("no memory for tensors: %s", std::strerror(errno)), false;
    slots_ = static_cast<Slot*>(range);
    return true;
  }

  std::mutex mutex_;
  Slot *slots_ = nullptr, *free_ = nullptr;
  std::size_t used_ = 0, live_ = 0;
};

Slots slots;

// Strides without gaps, with the axes in the order in which they lie; those of stride 0 stay where they are.
void close_up(const Tensor& tensor, std::int64_t* strides) {
  std::int32_t order[kMaxRank];  // the innermost axis first
  for (std::int32_t i = 0; i < tensor.rank; ++i) {
    const std::int32_t axis = order[i] = tensor.rank - 1 - i;
    const std::int64_t stride = tensor.strides[axis];
    for (std::int32_t at = i, j = i; j-- > 0;) {
      const std::int64_t other = tensor.strides[order[j]];
      if (stride == 0 || other == 0) continue;
      if (other < stride) break;
      if (other == stride && tensor.sizes[order[j]] <= tensor.sizes[axis]) continue;
      order[at] = order[j];
      order[j] = axis;
      at = j;
    }
  }
  std::int64_t step = 1;
  for (std::int32_t i = 0; i < tensor.rank; ++i) {
    strides[order[i]] = step;
    step *= tensor.sizes[order[i]] > 1 ? tensor.sizes[order[i]] : 1;
  }
}

Slot* slot_of(Handle handle) {
  Slot* slot = slots.find(handle);
  if (slot == nullptr) fail("%p is no tensor: it was deleted, or never made", handle);
  return slot;
}

}  // namespace

bool Tensor::is_contiguous() const {
  std::int64_t step = 1;
  for (std::int32_t axis = rank; axis-- > 0 && count > 0; step *= sizes[axis])
    if (sizes[axis] != 1 && strides[axis] != step) return false;
  return true;
}

Tensor* find(Handle handle) {
  Slot* slot = slot_of(handle);
  return slot != nullptr ? &slot->tensor : nullptr;
}

AOTITorchError make(const Tensor& tensor, Handle* handle) {
  *handle = slots.take(tensor);
  if (*handle != nullptr) return kDone;
  if (tensor.block != nullptr) release(tensor.block);
  return kFailed;
}

AOTITorchError remove(Handle handle) {
  Slot* slot = slot_of(handle);
  if (slot == nullptr) return kFailed;
  Block* block = slot->tensor.block;
  slots.give_back(slot);
  if (block != nullptr) release(block);
  return kDone;
}

AOTITorchError shape(Tensor& tensor, std::int64_t rank, const std::int64_t* sizes, const std::int64_t* strides,
                     std::int64_t offset, std::int32_t dtype, std::int64_t* bytes) {
  if (rank < 0 || rank > kMaxRank)
    return fail("a tensor of %lld axes, allowed 0..%lld", static_cast<long long>(rank),
                static_cast<long long>(kMaxRank));
  if (item_size(dtype) == 0) return fail("dtype %d is not known", dtype);
  if (offset < 0) return fail("a tensor that begins at element %lld", static_cast<long long>(offset));
  tensor.rank = static_cast<std::int32_t>(rank);
  tensor.dtype = dtype;
  tensor.offset = offset;
  tensor.count = 1;
  std::int64_t last = offset;
  bool fits = true;
  for (std::int64_t axis = 0; axis < rank; ++axis) {
    const std::int64_t size = tensor.sizes[axis] = sizes[axis], stride = tensor.strides[axis] = strides[axis];
    if (size < 0 || stride < 0)
      return fail("axis %lld has the size %lld and the stride %lld", static_cast<long long>(axis),
                  static_cast<long long>(size), static_cast<long long>(stride));
    std::int64_t reach = 0;
    fits = fits && !__builtin_mul_overflow(tensor.count, size, &tensor.count);
    if (size > 0)
      fits = fits && !__builtin_mul_overflow(size - 1, stride, &reach) && !__builtin_add_overflow(last, reach, &last);
  }
  std::int64_t elements = 0, whole = 0;
  fits = fits && !__builtin_add_overflow(last, 1, &elements) &&
         !__builtin_mul_overflow(elements, tensor.item(), &whole) &&
         !__builtin_mul_overflow(tensor.count, tensor.item(), &elements);
  if (!fits) return fail("a tensor with more elements than can be counted");
  *bytes = tensor.count == 0 ? 0 : whole;
  return kDone;
}

AOTITorchError make_empty(std::int64_t rank, const std::int64_t* sizes, const std::int64_t* strides, std::int32_t dtype,
                          Handle* handle) {
  Tensor tensor;
  if (shape(tensor, rank, sizes, strides, 0, dtype, &tensor.storage_bytes) != kDone) return kFailed;
  tensor.block = allocate(static_cast<std::size_t>(tensor.storage_bytes));
  if (tensor.block == nullptr)
    return fail("there is no memory for a tensor of %lld bytes", static_cast<long long>(tensor.storage_bytes));
  tensor.storage = tensor.block->data();
  return make(tensor, handle);
}

AOTITorchError make_view(const Tensor& self, std::int64_t rank, const std::int64_t* sizes, const std::int64_t* strides,
                         std::int64_t offset, std::int32_t dtype, Handle* handle) {
  Tensor view;
  std::int64_t bytes = 0;
  if (shape(view, rank, sizes, strides, offset, dtype, &bytes) != kDone) return kFailed;
  if (bytes > self.storage_bytes)
    return fail("a view of %lld bytes into a storage of %lld", static_cast<long long>(bytes),
                static_cast<long long>(self.storage_bytes));
  view.block = self.block;
  view.storage = self.storage;
  view.storage_bytes = self.storage_bytes;
  if (view.block != nullptr) share(view.block);
  return make(view, handle);
}

void row_major(std::int64_t rank, const std::int64_t* sizes, std::int64_t* strides) {
  std::int64_t step = 1;
  for (std::int64_t axis = rank; axis-- > 0; step *= sizes[axis] > 1 ? sizes[axis] : 1) strides[axis] = step;
}

void dense(const Tensor& tensor, std::int64_t* strides) {
  std::int64_t filled = 1;
  bool used[kMaxRank] = {};
  for (std::int32_t done = 0; done < tensor.rank; ++done) {
    std::int32_t next = -1;
    for (std::int32_t axis = 0; axis < tensor.rank && next < 0; ++axis)
      if (!used[axis] && (tensor.sizes[axis] == 1 || tensor.strides[axis] == filled)) next = axis;
    if (next < 0 || tensor.count == 0) return close_up(tensor, strides);
    used[next] = true;
    strides[next] = tensor.strides[next];
    filled *= tensor.sizes[next];
  }
}

MCTL_EXPORT AOTITorchError aoti_torch_delete_tensor_object(Handle handle) { return remove(handle); }

// How many tensors there are, and how much memory is held for them. For tests.
MCTL_EXPORT void mctl_shim_usage(std::int64_t* tensors, std::int64_t* bytes) {
  *tensors = static_cast<std::int64_t>(slots.live());
  *bytes = static_cast<std::int64_t>(held_bytes());
}

}  // namespace mctl::shim
