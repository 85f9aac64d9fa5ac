// The kernels of tiles.h for vectors of MCTL_FLOATS floats and MCTL_DOUBLES doubles, with tiles of MCTL_ROWS rows, as
// MCTL_KERNELS; or, with MCTL_PAIRS, only the tiles of pairs as that. Each file that includes this is compiled for the
// CPUs that have such vectors, so nothing here may be shared with others: no inline function of a header is called, but
// for the instructions' own.
#pragma once

#ifdef __x86_64__
#include <immintrin.h>
#endif
#include <string.h>

#include "exponential.h"
#include "tiles.h"

namespace {

using std::int64_t;

typedef std::uint64_t Wholes __attribute__((vector_size(8 * MCTL_DOUBLES)));
typedef std::uint32_t Words __attribute__((vector_size(4 * MCTL_FLOATS)));
typedef std::uint16_t Halves __attribute__((vector_size(2 * MCTL_FLOATS)));

template <class Vector, class T>
Vector plus_product(Vector sum, T x, Vector y) {
  return sum + x * y;
}

#ifdef MCTL_PAIRS
// It takes denormals for 0, and makes 0 of denormal sums.
Floats plus_product(Floats sum, mctl::shim::Pair x, Words y) {
  return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(x - Words{}), (__m512bh)y);
}
#endif

// Of 4-byte elements, four of each column: those of columns i, 4 + i, 8 + i, .. side by side.
template <class Element>
inline __attribute__((always_inline)) Words four_of(const Element* from, [[maybe_unused]] int64_t step) {
  Words result;
#if MCTL_FLOATS == 16
  const auto at = [&](int column) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + column * step)); };
  __m512i whole = _mm512_castsi128_si512(at(0));
  whole = _mm512_inserti32x4(whole, at(4), 1);
  whole = _mm512_inserti32x4(whole, at(8), 2);
  result = (Words)_mm512_inserti32x4(whole, at(12), 3);
#elif MCTL_FLOATS == 8
  const auto at = [&](int column) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + column * step)); };
  result = (Words)_mm256_inserti128_si256(_mm256_castsi128_si256(at(0)), at(4), 1);
#else
  memcpy(&result, from, sizeof result);
#endif
  return result;
}

// out[l][j] = from[j * step + l] for four l.
template <class Element>
inline __attribute__((always_inline)) void turn_four(const Element* from, int64_t step, Words* out) {
  const Words x[4] = {four_of(from, step), four_of(from + step, step), four_of(from + 2 * step, step),
                      four_of(from + 3 * step, step)};
#if MCTL_FLOATS == 16
#define MCTL_ZIP(what, one, other) _mm512_unpack##what((__m512i)(one), (__m512i)(other))
#elif MCTL_FLOATS == 8
#define MCTL_ZIP(what, one, other) _mm256_unpack##what((__m256i)(one), (__m256i)(other))
#endif
#ifdef MCTL_ZIP
  const auto low = MCTL_ZIP(lo_epi32, x[0], x[1]), other_low = MCTL_ZIP(lo_epi32, x[2], x[3]);
  const auto high = MCTL_ZIP(hi_epi32, x[0], x[1]), other_high = MCTL_ZIP(hi_epi32, x[2], x[3]);
  out[0] = (Words)MCTL_ZIP(lo_epi64, low, other_low);
  out[1] = (Words)MCTL_ZIP(hi_epi64, low, other_low);
  out[2] = (Words)MCTL_ZIP(lo_epi64, high, other_high);
  out[3] = (Words)MCTL_ZIP(hi_epi64, high, other_high);
#else
  for (int l = 0; l < 4; ++l) out[l] = Words{x[0][l], x[1][l], x[2][l], x[3][l]};
#endif
}

template <class Element>
Words turn_one(const Element* from, int64_t step) {
  Words result;
  for (int j = 0; j < MCTL_FLOATS; ++j) {
    std::uint32_t word;
    memcpy(&word, from + j * step, sizeof word);
    result[j] = word;
  }
  return result;
}

// An element, wherever it lies.
template <class Element>
Element at(const Element* place) {
  Element x;
  memcpy(&x, place, sizeof x);
  return x;
}

// `Vector` holds sums, `Factors` as many elements.
template <class Vector, class Factors, class T, class Element, int kRows>
void tile(int64_t k, const Element* a, int64_t a_stride, const Element* b, int64_t b_stride, T* out,
          int64_t out_stride) {
  constexpr int kLanes = sizeof(Vector) / sizeof(T);
  Vector sums[kRows][2] = {};
  for (int64_t l = 0; l < k; ++l, b += b_stride) {
    Factors left, right;
    memcpy(&left, b, sizeof left);
    memcpy(&right, b + kLanes, sizeof right);
#pragma GCC unroll 12
    for (int i = 0; i < kRows; ++i) {
      const Element x = at(a + i * a_stride + l);
      sums[i][0] = plus_product(sums[i][0], x, left);
      sums[i][1] = plus_product(sums[i][1], x, right);
    }
  }
#pragma GCC unroll 12
  for (int i = 0; i < kRows; ++i) memcpy(out + i * out_stride, sums[i], sizeof sums[i]);
}

// sums[i][kHalf] += a[i][l] * words
template <int kHalf, class Factors, class Element, int kRows>
inline __attribute__((always_inline)) void add(const Element* a, int64_t a_stride, Words words,
                                               Floats (&sums)[kRows][2]) {
#pragma GCC unroll 12
  for (int i = 0; i < kRows; ++i) sums[i][kHalf] = plus_product(sums[i][kHalf], at(a + i * a_stride), (Factors)words);
}

// For four l.
template <int kHalf, class Factors, class Element, int kRows>
inline __attribute__((always_inline)) void add_four(const Element* a, int64_t a_stride, const Element* b,
                                                    int64_t b_stride, Floats (&sums)[kRows][2]) {
  Words four[4];
  turn_four(b + kHalf * MCTL_FLOATS * b_stride, b_stride, four);
  add<kHalf, Factors>(a, a_stride, four[0], sums);
  add<kHalf, Factors>(a + 1, a_stride, four[1], sums);
  add<kHalf, Factors>(a + 2, a_stride, four[2], sums);
  add<kHalf, Factors>(a + 3, a_stride, four[3], sums);
}

// The same with columns in the place of b's rows.
template <class Factors, class Element, int kRows>
void turned_tile(int64_t k, const Element* a, int64_t a_stride, const Element* b, int64_t b_stride, float* out,
                 int64_t out_stride) {
  Floats sums[kRows][2] = {};
  for (; k >= 4; k -= 4, a += 4, b += 4) {
    add_four<0, Factors>(a, a_stride, b, b_stride, sums);
    add_four<1, Factors>(a, a_stride, b, b_stride, sums);
  }
  for (; k > 0; --k, ++a, ++b) {
    add<0, Factors>(a, a_stride, turn_one(b, b_stride), sums);
    add<1, Factors>(a, a_stride, turn_one(b + MCTL_FLOATS * b_stride, b_stride), sums);
  }
#pragma GCC unroll 12
  for (int i = 0; i < kRows; ++i) memcpy(out + i * out_stride, sums[i], sizeof sums[i]);
}

template <class Vector, class Factors, class T, class Element, int kRow = 1>
constexpr void fill(mctl::shim::Tiles<T, Element>& tiles) {
  if constexpr (kRow <= MCTL_ROWS) {
    tiles.of_rows[kRow - 1] = tile<Vector, Factors, T, Element, kRow>;
    if constexpr (sizeof(Element) == 4) tiles.turned[kRow - 1] = turned_tile<Factors, Element, kRow>;
    fill<Vector, Factors, T, Element, kRow + 1>(tiles);
  }
}

template <class Vector, class T, class Factors = Vector, class Element = T>
constexpr mctl::shim::Tiles<T, Element> tiles() {
  mctl::shim::Tiles<T, Element> made{MCTL_ROWS, 2 * sizeof(Vector) / sizeof(T), {}, {}};
  fill<Vector, Factors>(made);
  return made;
}

#ifndef MCTL_PAIRS

void turn(const void* from_any, int64_t step, int64_t count, void* to_any, int64_t to_stride) {
  const auto* from = static_cast<const std::uint32_t*>(from_any);
  auto* to = static_cast<std::uint32_t*>(to_any);
  for (; count >= 4; count -= 4, from += 4) {
    Words four[4];
    turn_four(from, step, four);
    for (int l = 0; l < 4; ++l, to += to_stride) memcpy(to, &four[l], sizeof four[l]);
  }
  for (; count > 0; --count, ++from, to += to_stride) {
    const Words one = turn_one(from, step);
    memcpy(to, &one, sizeof one);
  }
}

void zip(const std::uint16_t* from, int64_t step, int64_t count, mctl::shim::Pair* to, int64_t to_stride) {
  for (; count > 0; --count, from += 2 * step, to += to_stride) {
    Halves low, high;
    memcpy(&low, from, sizeof low);
    memcpy(&high, from + step, sizeof high);
    const Words pairs = __builtin_convertvector(low, Words) | __builtin_convertvector(high, Words) << 16;
    memcpy(to, &pairs, sizeof pairs);
  }
}

Halves nearest_halves(Floats x) {
  const Words bits = (Words)x, nan = (Words)(x != x), nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return __builtin_convertvector((nan & 0x7fc0) | (~nan & nearest), Halves);
}

void narrow(const float* from, int64_t count, std::uint16_t* to) {
  for (; count >= MCTL_FLOATS; count -= MCTL_FLOATS, from += MCTL_FLOATS, to += MCTL_FLOATS) {
    Floats x;
    memcpy(&x, from, sizeof x);
    const Halves halves = nearest_halves(x);
    memcpy(to, &halves, sizeof halves);
  }
  if (count == 0) return;
  Floats x = {};
  memcpy(&x, from, static_cast<unsigned long>(count) * sizeof(float));
  const Halves halves = nearest_halves(x);
  memcpy(to, &halves, static_cast<unsigned long>(count) * sizeof(std::uint16_t));
}

// Some vectors side by side, whose sums stay in registers.
template <int kVectors>
void add_vectors(const float* const* rows, const float* factors, int64_t count, int64_t column, float* sums) {
  Floats totals[kVectors];
  memcpy(totals, sums + column, sizeof totals);
  for (int64_t i = 0; i < count; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      Floats row;
      memcpy(&row, rows[i] + column + v * MCTL_FLOATS, sizeof row);
      totals[v] += row * factors[i];
    }
  }
  memcpy(sums + column, totals, sizeof totals);
}

void add_rows(const float* const* rows, const float* factors, int64_t count, int64_t columns, float* sums) {
  int64_t j = 0;
  for (; j + 4 * MCTL_FLOATS <= columns; j += 4 * MCTL_FLOATS) add_vectors<4>(rows, factors, count, j, sums);
  for (; j + MCTL_FLOATS <= columns; j += MCTL_FLOATS) add_vectors<1>(rows, factors, count, j, sums);
  for (; j < columns; ++j)
    for (int64_t i = 0; i < count; ++i) sums[j] += rows[i][j] * factors[i];
}

float exponentials(float* x, int64_t count, float scale, float base) {
  Floats sums = {};
  for (int64_t i = 0; i < count; i += MCTL_FLOATS) {
    const int64_t lanes = count - i < MCTL_FLOATS ? count - i : MCTL_FLOATS;
    Floats y = Floats{} - __builtin_inff();  // e^y is 0 where there is nothing
    memcpy(&y, x + i, static_cast<unsigned long>(lanes) * sizeof(float));
    y = exp_of(y * scale - base);
    memcpy(x + i, &y, static_cast<unsigned long>(lanes) * sizeof(float));
    for (int64_t lane = lanes; lane < MCTL_FLOATS; ++lane) y[lane] = 0;
    sums += y;
  }
  float sum = 0;
  for (int lane = 0; lane < MCTL_FLOATS; ++lane) sum += sums[lane];
  return sum;
}

float largest(const float* x, int64_t count, float scale) {
  Floats most = Floats{} - __builtin_inff();
  for (; count > 0; count -= MCTL_FLOATS, x += MCTL_FLOATS) {
    Floats y = Floats{} - __builtin_inff();
    if (count >= MCTL_FLOATS) {
      memcpy(&y, x, sizeof y);
      y = y * scale;
    } else {
      for (int64_t lane = 0; lane < count; ++lane) y[lane] = x[lane] * scale;
    }
    most = (y > most) | (y != y) ? y : most;
  }
  float result = most[0];
  for (int lane = 1; lane < MCTL_FLOATS; ++lane)
    result = most[lane] > result || most[lane] != most[lane] ? most[lane] : result;
  return result;
}

#endif

}  // namespace

namespace mctl::shim {

#ifdef MCTL_PAIRS
extern const Tiles<float, Pair> MCTL_PAIRS;
const Tiles<float, Pair> MCTL_PAIRS = tiles<Floats, float, Words, Pair>();
#else
extern const Kernels MCTL_KERNELS;
const Kernels MCTL_KERNELS = {tiles<Floats, float>(),
                              tiles<Doubles, double>(),
                              tiles<Wholes, std::uint64_t>(),
                              {},
                              exponentials,
                              largest,
                              turn,
                              zip,
                              narrow,
                              add_rows};
#endif

}  // namespace mctl::shim
