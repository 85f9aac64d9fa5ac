// A linear layer over row-major rows, on as many threads as pay.
#pragma once

#include <omp.h>

#include <memory>
#include <new>
#include <type_traits>

#include "product.h"

namespace mctl {

// Memory of the calling thread that is kept from call to call; throws std::bad_alloc.
template <int Use, class Element = float>
inline Element* scratch(std::int64_t count) {
  constexpr std::align_val_t alignment{64};
  struct Free {
    void operator()(Element* at) const { ::operator delete(at, alignment); }
  };
  thread_local std::unique_ptr<Element, Free> memory;
  thread_local std::int64_t size = 0;
  if (count > size) {
    memory.reset();
    size = 0;
    memory.reset(static_cast<Element*>(::operator new(static_cast<std::size_t>(count) * sizeof(Element), alignment)));
    size = count;
  }
  return memory.get();
}

// Each thread has at least so many multiply-adds, about 5 us of one core: an awake one is started and ended in 1 us.
inline constexpr std::int64_t kParallel = 250'000;

inline int threads_for(std::int64_t multiply_adds) {
  return multiply_adds < 2 * kParallel
             ? 1
             : static_cast<int>(std::min<std::int64_t>(omp_get_max_threads(), multiply_adds / kParallel));
}

// Calls work(index, count) on so many threads at most; throws std::bad_alloc if one of them did. The team is always
// that of all threads: g++'s OpenMP ends those that a smaller team has no place for, and starts others later.
template <class Work>
inline void in_parallel(int threads, const Work& work) {
  if (threads == 1) return work(0, 1);  // a region of one thread takes time too
  bool failed = false;
#pragma omp parallel reduction(|| : failed)
  try {
    const int count = std::min(threads, omp_get_num_threads()), index = omp_get_thread_num();
    if (index < count) work(index, count);
  } catch (const std::bad_alloc&) {
    failed = true;
  }
  if (failed) throw std::bad_alloc();
}

// The part [begin, end) of `count` things that thread `index` of `threads` has.
struct Share {
  Share(std::int64_t count, int index, int threads)
      : begin(count * index / threads), end(count * (index + 1) / threads) {}
  std::int64_t begin, end;
};

// Elements that hold `k` numbers.
template <class Element>
inline std::int64_t elements(std::int64_t k) {
  return std::is_same_v<Element, Pair> ? (k + 1) / 2 : k;
}

// Rows of `k` floats as the product takes them.
template <class Element>
Rows<const Element> factors(std::int64_t rows, std::int64_t k, Rows<const float> from);

// As they lie, or, where they would all fall into the same lines of the cache, a copy.
template <>
inline Rows<const float> factors(std::int64_t rows, std::int64_t k, Rows<const float> from) {
  if (from.stride % 1024 != 0 || k < 1024) return from;
  const Rows<float> copy{scratch<0>(rows * (k + kLanes)), k + kLanes};
  for (std::int64_t row = 0; row < rows; ++row)
    std::memcpy(copy[row], from[row], static_cast<std::size_t>(k) * sizeof(float));
  return {copy.data, copy.stride};
}

// `k` floats, rounded to bfloat16, as pairs.
inline void round_to(const float* x, std::int64_t k, Pair* to) {
  for (std::int64_t i = 0; i < k / 2; ++i) to[i] = rounded(x[2 * i]) | rounded(x[2 * i + 1]) << 16;
  if (k % 2 != 0) to[k / 2] = rounded(x[k - 1]);
}

// Rounded to bfloat16.
template <>
inline Rows<const Pair> factors(std::int64_t rows, std::int64_t k, Rows<const float> from) {
  const std::int64_t stride = ((elements<Pair>(k) + kLanes - 1) / kLanes | 1) * kLanes;  // odd: rows do not collide
  const Rows<Pair> to{scratch<0, Pair>(rows * stride), stride};
  for (std::int64_t row = 0; row < rows; ++row) round_to(from[row], k, to[row]);
  return {to.data, to.stride};
}

// One thread's part: rows [begin, end) in chunks that stay in the second-level cache, while the panels go by.
template <class Element>
void multiply_rows(Share rows, std::int64_t k, Rows<const float> a, const Packed<Element>& b, std::int64_t first,
                   std::int64_t last, const Finish& finish, Rows<float> out) {
  constexpr std::int64_t kCached = 1 << 16;  // floats
  const std::int64_t most = std::max<std::int64_t>(kCached / std::max<std::int64_t>(k, 1), kBlockRows);
  const std::int64_t count = rows.end - rows.begin;
  const std::int64_t chunks = (count + most - 1) / most;
  for (int i = 0; i < chunks; ++i) {
    const Share chunk(count, i, static_cast<int>(chunks));
    const std::int64_t begin = rows.begin + chunk.begin, size = chunk.end - chunk.begin;
    const Rows<const Element> from = factors<Element>(size, k, {a[begin], a.stride});
    Finish mine = finish;
    if (finish.residual != nullptr) mine.residual = finish.residual + begin * finish.residual_stride;
    multiply(size, elements<Element>(k), from, b, first, last, mine, {out[begin], out.stride});
  }
}

template <class Element>
void linear(std::int64_t rows, std::int64_t k, Rows<const float> a, const Packed<Element>& b, const Finish& finish,
            Rows<float> out) {
  const std::int64_t panels = panels_of(b.columns);
  const int threads = threads_for(rows * k * b.columns);
  const bool by_rows = rows >= 48 * threads || panels < threads;
  in_parallel(threads, [&](int index, int count) {
    const Share mine(panels, by_rows ? 0 : index, by_rows ? 1 : count);
    multiply_rows({rows, by_rows ? index : 0, by_rows ? count : 1}, k, a, b, mine.begin * kPanel,
                  std::min(mine.end * kPanel, b.columns), finish, out);
  });
}

}  // namespace mctl
