// A linear layer over row-major rows, on as many threads as pay.
#pragma once

#include <omp.h>

#include <memory>
#include <new>

#include "product.h"

namespace mctl {

// Memory of the calling thread that is kept from call to call; throws std::bad_alloc.
template <int Use>
inline float* scratch(std::int64_t floats) {
  constexpr std::align_val_t alignment{64};
  struct Free {
    void operator()(float* at) const { ::operator delete(at, alignment); }
  };
  thread_local std::unique_ptr<float, Free> memory;
  thread_local std::int64_t size = 0;
  if (floats > size) {
    memory.reset();
    size = 0;
    memory.reset(static_cast<float*>(::operator new(static_cast<std::size_t>(floats) * sizeof(float), alignment)));
    size = floats;
  }
  return memory.get();
}

// A loop is worth a second thread from this many multiply-adds on: about 20 us on one core.
inline constexpr std::int64_t kParallel = 1'000'000;

inline int threads_for(std::int64_t multiply_adds) {
  return multiply_adds < 2 * kParallel
             ? 1
             : static_cast<int>(std::min<std::int64_t>(omp_get_max_threads(), multiply_adds / kParallel));
}

// Calls work(index, count) on so many threads at most; throws std::bad_alloc if one of them did.
template <class Work>
inline void in_parallel(int threads, const Work& work) {
  bool failed = false;
#pragma omp parallel num_threads(threads) if (threads > 1) reduction(|| : failed)
  try {
    work(omp_get_thread_num(), omp_get_num_threads());
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

// One thread's part: rows [begin, end) in chunks that stay in the second-level cache, while the panels go by.
inline void multiply_rows(Share rows, std::int64_t k, Rows<const float> a, const Packed& b, std::int64_t first,
                          std::int64_t last, const Finish& finish, Rows<float> out) {
  constexpr std::int64_t kCached = 1 << 16;                // floats
  const bool collide = a.stride % 1024 == 0 && k >= 1024;  // rows that all fall into the same lines of the cache
  const std::int64_t most = std::max<std::int64_t>(kCached / std::max<std::int64_t>(k, 1), kBlockRows);
  const std::int64_t count = rows.end - rows.begin;
  const std::int64_t chunks = (count + most - 1) / most;
  for (int i = 0; i < chunks; ++i) {
    const Share chunk(count, i, static_cast<int>(chunks));
    const std::int64_t begin = rows.begin + chunk.begin, size = chunk.end - chunk.begin;
    Rows<const float> from{a[begin], a.stride};
    if (collide) {
      const Rows<float> copy{scratch<0>(size * (k + kLanes)), k + kLanes};
      for (std::int64_t row = 0; row < size; ++row)
        std::memcpy(copy[row], from[row], static_cast<std::size_t>(k) * sizeof(float));
      from = {copy.data, copy.stride};
    }
    Finish mine = finish;
    if (finish.residual != nullptr) mine.residual = finish.residual + begin * finish.residual_stride;
    multiply(size, k, from, b, first, last, mine, {out[begin], out.stride});
  }
}

inline void linear(std::int64_t rows, std::int64_t k, Rows<const float> a, const Packed& b, const Finish& finish,
                   Rows<float> out) {
  const std::int64_t panels = (b.columns + kPanel - 1) / kPanel;
  const int threads = threads_for(rows * k * b.columns);
  const bool by_rows = rows >= 48 * threads || panels < threads;
  in_parallel(threads, [&](int index, int count) {
    const Share mine(panels, by_rows ? 0 : index, by_rows ? 1 : count);
    multiply_rows({rows, by_rows ? index : 0, by_rows ? count : 1}, k, a, b, mine.begin * kPanel,
                  std::min(mine.end * kPanel, b.columns), finish, out);
  });
}

}  // namespace mctl
