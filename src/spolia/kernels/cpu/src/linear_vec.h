// Sixteen lanes, one per output column of a tile, at each level: the only part of `linear.cpp` that knows instructions.
//
//   F    16 float32              W    64 bytes: 4 consecutive k of each of 16 columns
//   Acc  16 int32 sums           dots<bits, count>(acc, q, weights), for tiles t and rows r, exact in int32:
//                                acc[t][r][c] += sum over g < count, i < 4 of weights<g>(t)[4c + i] * q(r)[4g + i]
//
// `bits` is how wide the weights are: what they leave of 16 bits decides how many products AVX2 adds up before it widens.
//
// Everything has internal linkage: a level's code must never be merged with another's.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "half_vec.h"
#include "linear.h"

#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(SPOLIA_LEVEL_neon)
#include <arm_neon.h>
#endif

#define SPOLIA_INLINE static inline __attribute__((always_inline))

namespace spolia::SPOLIA_LEVEL {
namespace {

// f<begin>(), f<begin + 1>(), ... as straight code: instructions take shifts and field numbers as constants.
template <int begin, int end, class Body>
SPOLIA_INLINE void unrolled(Body body) {
  if constexpr (begin < end) {
    body.template operator()<begin>();
    unrolled<begin + 1, end>(body);
  }
}
#define SPOLIA_LAMBDA __attribute__((always_inline))

#if defined(__SSE2__)
// Have x in a register here. GCC would put off the additions of a long sum, and with 16 registers spill what they wait for.
template <class V>
SPOLIA_INLINE V here(V x) {
#if defined(__AVX512F__)
  asm("" : "+v"(x));
#else
  asm("" : "+x"(x));
#endif
  return x;
}
#endif

SPOLIA_INLINE int32_t four_bytes(const void* p) {
  int32_t x;
  std::memcpy(&x, p, 4);
  return x;
}

#if defined(SPOLIA_LEVEL_avx512)

using F = __m512;
using W = __m512i;
using Acc = __m512i;
constexpr int kTiles = 2;             // tiles that share a row in registers
constexpr int kMaxRows = 6;           // rows that share a weight in registers: 12 int and 12 float sums of 32
constexpr int kMaxFloatRows = 8;      // the same of one tile of float weights
constexpr int64_t kManyRows = 32;     // from which unpacking once for all of them pays, for weights of ...
constexpr bool unpacking_pays(int bits) { return bits == 5 || bits == 6; }
constexpr bool kSignedBytes = false;  // Q8_0 is kept as q + 128, since a dot product takes unsigned weights

SPOLIA_INLINE F zero() { return _mm512_setzero_ps(); }
SPOLIA_INLINE F load(const float* p) { return _mm512_loadu_ps(p); }
SPOLIA_INLINE void store(float* p, F x) { _mm512_storeu_ps(p, x); }
SPOLIA_INLINE F splat(float x) { return _mm512_set1_ps(x); }
SPOLIA_INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
SPOLIA_INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
SPOLIA_INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
SPOLIA_INLINE F load_half(const uint8_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
SPOLIA_INLINE F load_u8(const uint8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))); }
SPOLIA_INLINE F load_i8(const uint8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))); }
SPOLIA_INLINE W load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
SPOLIA_INLINE void store_bytes(uint8_t* p, W w) { _mm512_storeu_si512(p, w); }
SPOLIA_INLINE W low_nibbles(W w) { return _mm512_and_si512(w, _mm512_set1_epi8(0x0f)); }
SPOLIA_INLINE W high_nibbles(W w) { return _mm512_and_si512(_mm512_srli_epi16(w, 4), _mm512_set1_epi8(0x0f)); }
SPOLIA_INLINE W add_fifth_bit(W w, const uint8_t* mask) {
  uint64_t bits;
  std::memcpy(&bits, mask, 8);
  return _mm512_mask_add_epi8(w, bits, w, _mm512_set1_epi8(16));
}
// Bits [2 * field, 2 * field + 2) of each byte of `plane` become bits 4 and 5 of `w`.
template <int field>
SPOLIA_INLINE W add_two_bits(W w, W plane) {
  W bits = field == 0 ? _mm512_slli_epi16(plane, 4) : field == 1 ? _mm512_slli_epi16(plane, 2) : field == 2 ? plane : _mm512_srli_epi16(plane, 2);
  return _mm512_ternarylogic_epi32(w, bits, _mm512_set1_epi8(0x30), 0xf8);  // w | (bits & 0x30)
}
SPOLIA_INLINE Acc start(int32_t x) { return _mm512_set1_epi32(x); }
template <int bits, int count, int T, int R, class Rows, class Weights>
SPOLIA_INLINE void dots(Acc (&acc)[T][R], Rows q, Weights weights) {
  unrolled<0, count>([&]<int i>() SPOLIA_LAMBDA {
    constexpr int g = count == 8 ? i / 2 + i % 2 * 4 : i;  // the two halves of a nibble vector one after the other
    W w[T];
    for (int t = 0; t < T; ++t) w[t] = weights.template operator()<g>(t);
    for (int r = 0; r < R; ++r) {
      W x = _mm512_set1_epi32(four_bytes(q(r) + 4 * g));
      if constexpr (T > 1) x = here(x);  // one load for all tiles
      for (int t = 0; t < T; ++t) acc[t][r] = _mm512_dpbusd_epi32(acc[t][r], w[t], x);
    }
  });
}
SPOLIA_INLINE F to_float(Acc acc) { return _mm512_cvtepi32_ps(acc); }
// acc[c] += w[c][0] * a[0] + w[c][1] * a[1]
#if defined(__AVX512BF16__)
SPOLIA_INLINE F dot_bf16(F acc, const uint8_t* w, const uint8_t* a) {
  return _mm512_dpbf16_ps(acc, (__m512bh)_mm512_loadu_si512(w), (__m512bh)_mm512_set1_epi32(four_bytes(a)));
}
#else
SPOLIA_INLINE __m512 even_bf16(__m512i w) { return _mm512_castsi512_ps(_mm512_slli_epi32(w, 16)); }
SPOLIA_INLINE __m512 odd_bf16(__m512i w) { return _mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32(int32_t(0xffff0000)))); }
SPOLIA_INLINE F dot_bf16(F acc, const uint8_t* w, const uint8_t* a) {
  const __m512i v = _mm512_loadu_si512(w), x = _mm512_set1_epi32(four_bytes(a));
  return fma(odd_bf16(v), odd_bf16(x), fma(even_bf16(v), even_bf16(x), acc));
}
#endif

// 32 values to the nearest of 255 steps, ties to even; returns the largest magnitude, NaN if a value is not finite.
SPOLIA_INLINE float quantise_32(const float* x, int8_t* q, int32_t (&sums)[2]) {
  const __m512 a = _mm512_loadu_ps(x), b = _mm512_loadu_ps(x + 16);
  constexpr int kNanOrInfinite = 0x99;
  if (_mm512_fpclass_ps_mask(a, kNanOrInfinite) | _mm512_fpclass_ps_mask(b, kNanOrInfinite)) return std::nanf("");
  const float largest = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(a), _mm512_abs_ps(b)));
  const __m512 inverse = _mm512_set1_ps(largest > 0 ? 127.0f / largest : 0.0f);
  const __m512i qa = _mm512_cvtps_epi32(_mm512_mul_ps(a, inverse)), qb = _mm512_cvtps_epi32(_mm512_mul_ps(b, inverse));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(q), _mm512_cvtepi32_epi8(qa));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(q + 16), _mm512_cvtepi32_epi8(qb));
  sums[0] = _mm512_reduce_add_epi32(qa);
  sums[1] = _mm512_reduce_add_epi32(qb);
  return largest;
}

#elif defined(SPOLIA_LEVEL_avx2)

struct F { __m256 lo, hi; };
struct W { __m256i lo, hi; };
struct Acc { __m256i lo, hi; };
constexpr int kTiles = 1, kMaxRows = 4, kMaxFloatRows = 3;
constexpr int64_t kManyRows = 16;
constexpr bool unpacking_pays(int bits) { return bits != 8; }
constexpr bool kSignedBytes = true;  // the 16-bit sums of maddubs hold |q| <= 128 times 127 twice, not 255 times 127

SPOLIA_INLINE F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
SPOLIA_INLINE F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
SPOLIA_INLINE void store(float* p, F x) { _mm256_storeu_ps(p, x.lo); _mm256_storeu_ps(p + 8, x.hi); }
SPOLIA_INLINE F splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
SPOLIA_INLINE F mul(F a, F b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
SPOLIA_INLINE F add(F a, F b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
SPOLIA_INLINE F fma(F a, F b, F c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
SPOLIA_INLINE F load_half(const uint8_t* p) {
  const __m128i* v = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(v)), _mm256_cvtph_ps(_mm_loadu_si128(v + 1))};
}
SPOLIA_INLINE F load_u8(const uint8_t* p) {
  const __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(v)), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(v, 8)))};
}
SPOLIA_INLINE F load_i8(const uint8_t* p) {
  const __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(v)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(v, 8)))};
}
SPOLIA_INLINE W load_bytes(const uint8_t* p) {
  const __m256i* v = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(v), _mm256_loadu_si256(v + 1)};
}
SPOLIA_INLINE void store_bytes(uint8_t* p, W w) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), w.lo);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 32), w.hi);
}
SPOLIA_INLINE __m256i low_half(__m256i w) { return _mm256_and_si256(w, _mm256_set1_epi8(0x0f)); }
SPOLIA_INLINE W low_nibbles(W w) { return {low_half(w.lo), low_half(w.hi)}; }
SPOLIA_INLINE W high_nibbles(W w) { return {low_half(_mm256_srli_epi16(w.lo, 4)), low_half(_mm256_srli_epi16(w.hi, 4))}; }
SPOLIA_INLINE __m256i fifth_bits(const uint8_t* mask) {  // 32 bits -> 32 bytes of 0 or 16
  int32_t bits;
  std::memcpy(&bits, mask, 4);
  const __m256i spread = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
  const __m256i select = _mm256_set1_epi64x(int64_t(0x8040201008040201));
  const __m256i bytes = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(bits), spread), select);
  return _mm256_and_si256(_mm256_cmpeq_epi8(bytes, select), _mm256_set1_epi8(16));
}
SPOLIA_INLINE W add_fifth_bit(W w, const uint8_t* mask) {
  return {_mm256_or_si256(w.lo, fifth_bits(mask)), _mm256_or_si256(w.hi, fifth_bits(mask + 4))};
}
template <int field>
SPOLIA_INLINE __m256i two_bits(__m256i p) {
  p = field == 0 ? _mm256_slli_epi16(p, 4) : field == 1 ? _mm256_slli_epi16(p, 2) : field == 2 ? p : _mm256_srli_epi16(p, 2);
  return _mm256_and_si256(p, _mm256_set1_epi8(0x30));
}
template <int field>
SPOLIA_INLINE W add_two_bits(W w, W plane) {
  return {_mm256_or_si256(w.lo, two_bits<field>(plane.lo)), _mm256_or_si256(w.hi, two_bits<field>(plane.hi))};
}
SPOLIA_INLINE Acc start(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
SPOLIA_INLINE __m256i add_fours(__m256i acc, __m256i pairs) { return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))); }
template <int bits, int count, int R, class Rows, class Weights>
SPOLIA_INLINE void dots(Acc (&accs)[1][R], Rows q, Weights weights) {
  Acc (&acc)[R] = accs[0];
  // Sums of pairs that fit in 16 bits: 2 * 127 * (2^bits - 1) each.
  constexpr int most = bits == 4 ? 8 : bits == 5 ? 4 : bits == 6 ? 2 : 1;
  constexpr int run = most < count ? most : count;
  W sums[R];
  unrolled<0, count>([&]<int g>() SPOLIA_LAMBDA {
    W w = weights.template operator()<g>(0), magnitude = w;
    if constexpr (bits == 8) magnitude = {_mm256_abs_epi8(w.lo), _mm256_abs_epi8(w.hi)};
    for (int r = 0; r < R; ++r) {
      const __m256i x = _mm256_set1_epi32(four_bytes(q(r) + 4 * g));
      W x_signed = {x, x};
      if constexpr (bits == 8) x_signed = {_mm256_sign_epi8(x, w.lo), _mm256_sign_epi8(x, w.hi)};
      const W pairs = {_mm256_maddubs_epi16(magnitude.lo, x_signed.lo), _mm256_maddubs_epi16(magnitude.hi, x_signed.hi)};
      if constexpr (g % run == 0) sums[r] = {here(pairs.lo), here(pairs.hi)};
      else sums[r] = {here(_mm256_add_epi16(sums[r].lo, pairs.lo)), here(_mm256_add_epi16(sums[r].hi, pairs.hi))};
      if constexpr (g % run == run - 1) acc[r] = {add_fours(acc[r].lo, sums[r].lo), add_fours(acc[r].hi, sums[r].hi)};
    }
  });
}
SPOLIA_INLINE F to_float(Acc acc) { return {_mm256_cvtepi32_ps(acc.lo), _mm256_cvtepi32_ps(acc.hi)}; }
SPOLIA_INLINE __m256 even_bf16(__m256i w) { return _mm256_castsi256_ps(_mm256_slli_epi32(w, 16)); }
SPOLIA_INLINE __m256 odd_bf16(__m256i w) { return _mm256_castsi256_ps(_mm256_and_si256(w, _mm256_set1_epi32(int32_t(0xffff0000)))); }
SPOLIA_INLINE F dot_bf16(F acc, const uint8_t* p, const uint8_t* a) {
  const W w = load_bytes(p);
  const __m256i x = _mm256_set1_epi32(four_bytes(a));
  const __m256 even = even_bf16(x), odd = odd_bf16(x);
  return {_mm256_fmadd_ps(odd_bf16(w.lo), odd, _mm256_fmadd_ps(even_bf16(w.lo), even, acc.lo)),
          _mm256_fmadd_ps(odd_bf16(w.hi), odd, _mm256_fmadd_ps(even_bf16(w.hi), even, acc.hi))};
}

SPOLIA_INLINE __m256 magnitudes(__m256 x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
SPOLIA_INLINE int32_t sum_lanes(__m256i x) {
  const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}
// 32 values to the nearest of 255 steps, ties to even; returns the largest magnitude, NaN if a value is not finite.
SPOLIA_INLINE float quantise_32(const float* x, int8_t* q, int32_t (&sums)[2]) {
  __m256 v[4], largest_of = _mm256_setzero_ps(), finite = _mm256_castsi256_ps(_mm256_set1_epi32(-1));
  for (int i = 0; i < 4; ++i) {
    v[i] = _mm256_loadu_ps(x + 8 * i);
    largest_of = _mm256_max_ps(largest_of, magnitudes(v[i]));
    finite = _mm256_and_ps(finite, _mm256_cmp_ps(magnitudes(v[i]), _mm256_set1_ps(3.4028235e38f), _CMP_LE_OQ));
  }
  if (_mm256_movemask_ps(finite) != 0xff) return std::nanf("");
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(largest_of), _mm256_extractf128_ps(largest_of, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  const float largest = _mm_cvtss_f32(_mm_max_ss(m, _mm_shuffle_ps(m, m, 1)));
  const __m256 inverse = _mm256_set1_ps(largest > 0 ? 127.0f / largest : 0.0f);
  __m256i n[4];
  for (int i = 0; i < 4; ++i) n[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], inverse));
  sums[0] = sum_lanes(_mm256_add_epi32(n[0], n[1]));
  sums[1] = sum_lanes(_mm256_add_epi32(n[2], n[3]));
  // Packing works within 128-bit halves; the permutation restores the order.
  const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(n[0], n[1]), _mm256_packs_epi32(n[2], n[3]));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), _mm256_permutevar8x32_epi32(bytes, order));
  return largest;
}

#else  // neon and generic: 128-bit vectors of the compiler's, which any CPU has; the CPU's own where they have no portable name

typedef uint16_t Halves4 __attribute__((vector_size(8)));
typedef uint8_t Bytes16 __attribute__((vector_size(16)));
typedef uint8_t Bytes4 __attribute__((vector_size(4)));
typedef int8_t SignedBytes4 __attribute__((vector_size(4)));
typedef uint64_t Longs2 __attribute__((vector_size(16)));
struct F { Floats4 v[4]; };
struct W { Bytes16 v[4]; };
#if defined(SPOLIA_LEVEL_neon)
constexpr int kTiles = 1, kMaxRows = 4, kMaxFloatRows = 3;
constexpr int64_t kManyRows = 16;
constexpr bool unpacking_pays(int bits) { return bits != 8; }
constexpr bool kSignedBytes = true;  // sdot takes signed weights
#else
constexpr int kTiles = 1, kMaxRows = 4, kMaxFloatRows = 2;
constexpr int64_t kManyRows = 1;  // always
constexpr bool kSignedBytes = false;
#endif

template <class V>
SPOLIA_INLINE V load_vector(const void* p) { V v; std::memcpy(&v, p, 16); return v; }
template <class Make>
SPOLIA_INLINE F four_of(Make make) { return {{make(0), make(1), make(2), make(3)}}; }

SPOLIA_INLINE F splat(float x) { const Floats4 v = {x, x, x, x}; return {{v, v, v, v}}; }
SPOLIA_INLINE F zero() { return splat(0); }
SPOLIA_INLINE F load(const float* p) { return four_of([&](int i) SPOLIA_LAMBDA { return load_vector<Floats4>(p + 4 * i); }); }
SPOLIA_INLINE void store(float* p, F x) { std::memcpy(p, &x, 64); }
SPOLIA_INLINE F mul(F a, F b) { return four_of([&](int i) SPOLIA_LAMBDA { return a.v[i] * b.v[i]; }); }
SPOLIA_INLINE F add(F a, F b) { return four_of([&](int i) SPOLIA_LAMBDA { return a.v[i] + b.v[i]; }); }
#if defined(SPOLIA_LEVEL_neon)
SPOLIA_INLINE Floats4 fma(Floats4 a, Floats4 b, Floats4 c) { return vfmaq_f32(c, a, b); }
#else
SPOLIA_INLINE Floats4 fma(Floats4 a, Floats4 b, Floats4 c) { return a * b + c; }
#endif
SPOLIA_INLINE F fma(F a, F b, F c) { return four_of([&](int i) SPOLIA_LAMBDA { return fma(a.v[i], b.v[i], c.v[i]); }); }

template <class Narrow, class Wide>
SPOLIA_INLINE Wide widened(const uint8_t* p) {
  Narrow v;
  std::memcpy(&v, p, sizeof v);
  return __builtin_convertvector(v, Wide);
}
SPOLIA_INLINE F load_half(const uint8_t* p) {
#if defined(SPOLIA_LEVEL_neon)
  return four_of([&](int i) SPOLIA_LAMBDA { return (Floats4)vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p + 8 * i))); });
#else
  return four_of([&](int i) SPOLIA_LAMBDA { return half_to_float(widened<Halves4, Words4>(p + 8 * i)); });
#endif
}
SPOLIA_INLINE F load_u8(const uint8_t* p) { return four_of([&](int i) SPOLIA_LAMBDA { return widened<Bytes4, Floats4>(p + 4 * i); }); }
SPOLIA_INLINE F load_i8(const uint8_t* p) { return four_of([&](int i) SPOLIA_LAMBDA { return widened<SignedBytes4, Floats4>(p + 4 * i); }); }
template <class Make>
SPOLIA_INLINE W bytes_of(Make make) { return {{make(0), make(1), make(2), make(3)}}; }
SPOLIA_INLINE W load_bytes(const uint8_t* p) { return bytes_of([&](int i) SPOLIA_LAMBDA { return load_vector<Bytes16>(p + 16 * i); }); }
SPOLIA_INLINE void store_bytes(uint8_t* p, W w) { std::memcpy(p, &w, 64); }
// Shifts go across bytes, as SSE2 has none within; the mask clears what came over.
SPOLIA_INLINE Bytes16 shifted_right(Bytes16 v, int bits, uint8_t mask) { return (Bytes16)((Longs2)v >> bits) & mask; }
SPOLIA_INLINE W low_nibbles(W w) { return bytes_of([&](int i) SPOLIA_LAMBDA { return w.v[i] & 15; }); }
SPOLIA_INLINE W high_nibbles(W w) { return bytes_of([&](int i) SPOLIA_LAMBDA { return shifted_right(w.v[i], 4, 15); }); }
#if defined(SPOLIA_LEVEL_neon)
SPOLIA_INLINE W add_fifth_bit(W w, const uint8_t* mask) {  // 64 bits -> 64 bytes of 0 or 16
  const Bytes16 bits = vcombine_u8(vld1_u8(mask), vld1_u8(mask)), select = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201));
  const Bytes16 spread = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1};
  return bytes_of([&](int i) SPOLIA_LAMBDA { return w.v[i] | (vtstq_u8(vqtbl1q_u8(bits, spread + uint8_t(2 * i)), select) & 16); });
}
#else
SPOLIA_INLINE uint64_t fifth_bits(uint8_t mask) {  // 8 bits -> 8 bytes of 0 or 16
  const uint64_t eight = (mask * uint64_t(0x0101010101010101)) & uint64_t(0x8040201008040201);
  return ((eight + 0x7f7f7f7f7f7f7f7f) & 0x8080808080808080) >> 3;  // a byte that is not 0 carries into its top bit
}
SPOLIA_INLINE W add_fifth_bit(W w, const uint8_t* mask) {
  return bytes_of([&](int i) SPOLIA_LAMBDA { return w.v[i] | (Bytes16)Longs2{fifth_bits(mask[2 * i]), fifth_bits(mask[2 * i + 1])}; });
}
#endif
template <int field>
SPOLIA_INLINE W add_two_bits(W w, W plane) {
  return bytes_of([&](int i) SPOLIA_LAMBDA {
    const Longs2 p = (Longs2)plane.v[i];
    return w.v[i] | ((Bytes16)(field < 2 ? p << (4 - 2 * field) : p >> (2 * field - 4)) & 0x30);
  });
}
#if defined(SPOLIA_LEVEL_neon)
struct Acc { int32x4_t sums[4]; };
SPOLIA_INLINE Acc start(int32_t x) {
  const int32x4_t s = vdupq_n_s32(x);
  return {{s, s, s, s}};
}
template <int bits, int count, int R, class Rows, class Weights>
SPOLIA_INLINE void dots(Acc (&accs)[1][R], Rows q, Weights weights) {
  Acc (&acc)[R] = accs[0];
  int8x16_t x[R][count / 4];
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < count / 4; ++i) x[r][i] = vld1q_s8(q(r) + 16 * i);
  unrolled<0, count>([&]<int g>() SPOLIA_LAMBDA {
    const W w = weights.template operator()<g>(0);
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < 4; ++i) acc[r].sums[i] = vdotq_laneq_s32(acc[r].sums[i], vreinterpretq_s8_u8(w.v[i]), x[r][g / 4], g % 4);
  });
}
SPOLIA_INLINE F to_float(const Acc& acc) { return four_of([&](int i) SPOLIA_LAMBDA { return (Floats4)vcvtq_f32_s32(acc.sums[i]); }); }
#elif defined(__SSE2__)
struct Acc { __m128i pairs[8]; };  // of column c: k 0 and 1 in lane 2c, k 2 and 3 in lane 2c + 1
SPOLIA_INLINE Acc start(int32_t x) {
  const __m128i p = _mm_setr_epi32(x, 0, x, 0);
  return {{p, p, p, p, p, p, p, p}};
}
template <int bits, int count, int R, class Rows, class Weights>
SPOLIA_INLINE void dots(Acc (&accs)[1][R], Rows q, Weights weights) {
  Acc (&acc)[R] = accs[0];
  const __m128i none = _mm_setzero_si128();
  __m128i x[R][count];  // four of a row, twice over, in 16 bits
  for (int r = 0; r < R; ++r)
    for (int g = 0; g < count; ++g) {
      const __m128i bytes = _mm_set1_epi32(four_bytes(q(r) + 4 * g));
      x[r][g] = _mm_unpacklo_epi8(bytes, _mm_cmpgt_epi8(none, bytes));
    }
  unrolled<0, 4>([&]<int i>() SPOLIA_LAMBDA {  // 4 columns: their sums, of 4 rows, fit in registers
    __m128i low[R], high[R];
    for (int r = 0; r < R; ++r) low[r] = acc[r].pairs[2 * i], high[r] = acc[r].pairs[2 * i + 1];
    unrolled<0, count>([&]<int g>() SPOLIA_LAMBDA {
      const __m128i w = (__m128i)weights.template operator()<g>(0).v[i];
      const __m128i a = _mm_unpacklo_epi8(w, none), b = _mm_unpackhi_epi8(w, none);
      for (int r = 0; r < R; ++r) low[r] = here(_mm_add_epi32(low[r], _mm_madd_epi16(a, x[r][g])));
      for (int r = 0; r < R; ++r) high[r] = here(_mm_add_epi32(high[r], _mm_madd_epi16(b, x[r][g])));
    });
    for (int r = 0; r < R; ++r) acc[r].pairs[2 * i] = low[r], acc[r].pairs[2 * i + 1] = high[r];
  });
}
SPOLIA_INLINE F to_float(const Acc& acc) {
  return four_of([&](int i) SPOLIA_LAMBDA {
    const __m128 a = _mm_castsi128_ps(acc.pairs[2 * i]), b = _mm_castsi128_ps(acc.pairs[2 * i + 1]);
    const __m128i even = _mm_castps_si128(_mm_shuffle_ps(a, b, 0x88)), odd = _mm_castps_si128(_mm_shuffle_ps(a, b, 0xdd));
    return (Floats4)_mm_cvtepi32_ps(_mm_add_epi32(even, odd));
  });
}
#else
struct Acc { int32_t sums[16]; };
SPOLIA_INLINE Acc start(int32_t x) {
  Acc acc;
  for (int32_t& s : acc.sums) s = x;
  return acc;
}
template <int bits, int count, int R, class Rows, class Weights>
SPOLIA_INLINE void dots(Acc (&accs)[1][R], Rows q, Weights weights) {
  Acc (&acc)[R] = accs[0];
  unrolled<0, count>([&]<int g>() SPOLIA_LAMBDA {
    const W w = weights.template operator()<g>(0);
    uint8_t bytes[64];
    std::memcpy(bytes, &w, 64);
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < 16; ++c)
        for (int t = 0; t < 4; ++t) acc[r].sums[c] += int32_t(bytes[4 * c + t]) * q(r)[4 * g + t];
  });
}
SPOLIA_INLINE F to_float(const Acc& acc) {
  return four_of([&](int i) SPOLIA_LAMBDA {
    const int32_t* s = acc.sums + 4 * i;
    return Floats4{float(s[0]), float(s[1]), float(s[2]), float(s[3])};
  });
}
#endif
SPOLIA_INLINE F dot_bf16(F acc, const uint8_t* p, const uint8_t* a) {
  const uint32_t two = uint32_t(four_bytes(a));
  const Words4 x = {two, two, two, two};
  const Floats4 x_even = (Floats4)(x << 16), x_odd = (Floats4)(x & 0xffff0000);
  return four_of([&](int i) SPOLIA_LAMBDA {
    const Words4 w = load_vector<Words4>(p + 16 * i);
    return fma((Floats4)(w & 0xffff0000), x_odd, fma((Floats4)(w << 16), x_even, acc.v[i]));
  });
}

// 32 values to the nearest of 255 steps, ties to even; returns the largest magnitude, NaN if a value is not finite.
SPOLIA_INLINE float quantise_32(const float* x, int8_t* q, int32_t (&sums)[2]) {
#if defined(SPOLIA_LEVEL_neon)
  float32x4_t largest_of = vdupq_n_f32(0);
  for (int i = 0; i < 8; ++i) largest_of = vmaxq_f32(largest_of, vabsq_f32(vld1q_f32(x + 4 * i)));  // NaN stays NaN
  const float largest = vmaxvq_f32(largest_of);
  if (!(largest <= 3.4028235e38f)) return std::nanf("");
  const float inverse = largest > 0 ? 127.0f / largest : 0.0f;
  for (int h = 0; h < 2; ++h) {
    int32x4_t n[4];
    for (int i = 0; i < 4; ++i) n[i] = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + 16 * h + 4 * i), inverse));
    sums[h] = vaddvq_s32(vaddq_s32(vaddq_s32(n[0], n[1]), vaddq_s32(n[2], n[3])));
    const int16x8_t low = vcombine_s16(vmovn_s32(n[0]), vmovn_s32(n[1])), high = vcombine_s16(vmovn_s32(n[2]), vmovn_s32(n[3]));
    vst1q_s8(q + 16 * h, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
  }
  return largest;
#else
  float largest = 0, poison = 0;
  for (int i = 0; i < 32; ++i) {
    const float magnitude = std::fabs(x[i]);
    largest = magnitude > largest ? magnitude : largest;
    poison += x[i] * 0.0f;  // NaN where a value is not finite: it must not vanish in the comparison
  }
  const float inverse = largest > 0 ? 127.0f / largest : 0.0f;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  for (int h = 0; h < 2; ++h) {
    sums[h] = 0;
    for (int i = 16 * h; i < 16 * h + 16; ++i) {
      const float shifted = x[i] * inverse + kRound;
      int32_t bits;
      std::memcpy(&bits, &shifted, 4);
      q[i] = int8_t(bits - 0x4b400000);
      sums[h] += q[i];
    }
  }
  return largest + poison;
#endif
}

#endif

}  // namespace
}  // namespace spolia::SPOLIA_LEVEL
