// Sixteen lanes, one per output column of a tile, at each level: the only part of `linear.cpp` that knows instructions.
//
//   F    16 float32              W    64 unsigned bytes: 4 consecutive k of each of 16 columns
//   Acc  16 int32 sums           dot  acc[c] += sum over t < 4 of w[4c + t] * a[t], exact in int32
//
// Everything has internal linkage: a level's code must never be merged with another's.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "linear.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#define SPOLIA_INLINE static inline __attribute__((always_inline))

namespace spolia::SPOLIA_LEVEL {
namespace {

#if defined(SPOLIA_LEVEL_avx512)

using F = __m512;
using W = __m512i;
using Acc = __m512i;
constexpr int kMaxRows = 8;           // rows that share an unpacked weight: 8 int and 8 float accumulators of 32 registers
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
SPOLIA_INLINE Acc dot(Acc acc, W w, const int8_t* a) {
  int32_t four;
  std::memcpy(&four, a, 4);
  return _mm512_dpbusd_epi32(acc, w, _mm512_set1_epi32(four));
}
SPOLIA_INLINE Acc dot_bytes(Acc acc, W w, const int8_t* a) { return dot(acc, w, a); }
SPOLIA_INLINE F to_float(Acc acc) { return _mm512_cvtepi32_ps(acc); }
// acc[c] += w[c][0] * a[0] + w[c][1] * a[1]
SPOLIA_INLINE F dot_bf16(F acc, const uint8_t* w, const uint8_t* a) {
  int32_t two;
  std::memcpy(&two, a, 4);
  return _mm512_dpbf16_ps(acc, (__m512bh)_mm512_loadu_si512(w), (__m512bh)_mm512_set1_epi32(two));
}

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
constexpr int kMaxRows = 3;
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
SPOLIA_INLINE __m256i broadcast_four(const int8_t* a) {
  int32_t four;
  std::memcpy(&four, a, 4);
  return _mm256_set1_epi32(four);
}
SPOLIA_INLINE Acc dot(Acc acc, W w, const int8_t* a) {  // weights below 64: pairs stay below 2^15
  const __m256i x = broadcast_four(a);
  return {add_fours(acc.lo, _mm256_maddubs_epi16(w.lo, x)), add_fours(acc.hi, _mm256_maddubs_epi16(w.hi, x))};
}
SPOLIA_INLINE Acc dot_bytes(Acc acc, W w, const int8_t* a) {
  const __m256i x = broadcast_four(a);
  return {add_fours(acc.lo, _mm256_maddubs_epi16(_mm256_abs_epi8(w.lo), _mm256_sign_epi8(x, w.lo))),
          add_fours(acc.hi, _mm256_maddubs_epi16(_mm256_abs_epi8(w.hi), _mm256_sign_epi8(x, w.hi)))};
}
SPOLIA_INLINE F to_float(Acc acc) { return {_mm256_cvtepi32_ps(acc.lo), _mm256_cvtepi32_ps(acc.hi)}; }
SPOLIA_INLINE __m256 even_bf16(__m256i w) { return _mm256_castsi256_ps(_mm256_slli_epi32(w, 16)); }
SPOLIA_INLINE __m256 odd_bf16(__m256i w) { return _mm256_castsi256_ps(_mm256_and_si256(w, _mm256_set1_epi32(int32_t(0xffff0000)))); }
SPOLIA_INLINE F dot_bf16(F acc, const uint8_t* p, const uint8_t* a) {
  const W w = load_bytes(p);
  int32_t two;
  std::memcpy(&two, a, 4);
  const __m256 even = even_bf16(_mm256_set1_epi32(two)), odd = odd_bf16(_mm256_set1_epi32(two));
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

#else  // generic: vectors of the compiler's, on any CPU; SSE2, which every x86-64 has, where plain code would be slow

typedef float F __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
struct W { alignas(16) uint8_t bytes[64]; };
constexpr int kMaxRows = 2;
constexpr bool kSignedBytes = false;

SPOLIA_INLINE F zero() { return F{}; }
SPOLIA_INLINE F load(const float* p) { F x; std::memcpy(&x, p, 64); return x; }
SPOLIA_INLINE void store(float* p, F x) { std::memcpy(p, &x, 64); }
SPOLIA_INLINE F splat(float x) { return F{} + x; }
SPOLIA_INLINE F mul(F a, F b) { return a * b; }
SPOLIA_INLINE F add(F a, F b) { return a + b; }
SPOLIA_INLINE F fma(F a, F b, F c) { return a * b + c; }
SPOLIA_INLINE float half_to_float(uint16_t h) {
  // Shift exponent and mantissa into place, then scale by 2^112 to correct the bias; that also normalises subnormals.
  const uint32_t magnitude = uint32_t(h & 0x7fff) << 13, sign = uint32_t(h & 0x8000) << 16;
  uint32_t bits = magnitude;
  float x;
  if (magnitude >= (uint32_t(0x7c00) << 13)) {
    bits += uint32_t(112) << 23;
    bits += uint32_t(112) << 23;  // infinity and NaN have the largest exponent
    bits |= sign;
    std::memcpy(&x, &bits, 4);
    return x;
  }
  std::memcpy(&x, &bits, 4);
  x *= 0x1p112f;
  std::memcpy(&bits, &x, 4);
  bits |= sign;
  std::memcpy(&x, &bits, 4);
  return x;
}
SPOLIA_INLINE F load_half(const uint8_t* p) {
  alignas(64) float x[16];
  for (int i = 0; i < 16; ++i) {
    uint16_t h;
    std::memcpy(&h, p + 2 * i, 2);
    x[i] = half_to_float(h);
  }
  return load(x);
}
SPOLIA_INLINE F load_u8(const uint8_t* p) {
  alignas(64) float x[16];
  for (int i = 0; i < 16; ++i) x[i] = float(p[i]);
  return load(x);
}
SPOLIA_INLINE F load_i8(const uint8_t* p) {
  alignas(64) float x[16];
  for (int i = 0; i < 16; ++i) x[i] = float(int8_t(p[i]));
  return load(x);
}
SPOLIA_INLINE W load_bytes(const uint8_t* p) { W w; std::memcpy(w.bytes, p, 64); return w; }
SPOLIA_INLINE W low_nibbles(W w) { for (uint8_t& b : w.bytes) b &= 15; return w; }
SPOLIA_INLINE W high_nibbles(W w) { for (uint8_t& b : w.bytes) b = uint8_t(b >> 4); return w; }
SPOLIA_INLINE W add_fifth_bit(W w, const uint8_t* mask) {
  for (int i = 0; i < 8; ++i) {
    uint64_t eight = (mask[i] * uint64_t(0x0101010101010101)) & uint64_t(0x8040201008040201);
    eight = ((eight + 0x7f7f7f7f7f7f7f7f) & 0x8080808080808080) >> 3;  // a byte that is not 0 becomes 16
    uint64_t bytes;
    std::memcpy(&bytes, w.bytes + 8 * i, 8);
    bytes |= eight;
    std::memcpy(w.bytes + 8 * i, &bytes, 8);
  }
  return w;
}
template <int field>
SPOLIA_INLINE W add_two_bits(W w, const W& plane) {
  for (int i = 0; i < 64; ++i) w.bytes[i] = uint8_t(w.bytes[i] | (((plane.bytes[i] >> (2 * field)) & 3) << 4));
  return w;
}
#if defined(__SSE2__)
struct Acc { __m128i pairs[8]; };  // of column c: k 0 and 1 in lane 2c, k 2 and 3 in lane 2c + 1
SPOLIA_INLINE Acc start(int32_t x) {
  Acc acc;
  for (__m128i& p : acc.pairs) p = _mm_setr_epi32(x, 0, x, 0);
  return acc;
}
SPOLIA_INLINE Acc dot(Acc acc, const W& w, const int8_t* a) {
  int32_t four;
  std::memcpy(&four, a, 4);
  const __m128i bytes = _mm_set1_epi32(four), none = _mm_setzero_si128();
  const __m128i x = _mm_unpacklo_epi8(bytes, _mm_cmpgt_epi8(none, bytes));  // sign-extended to 16 bits
  for (int i = 0; i < 4; ++i) {
    const __m128i v = _mm_load_si128(reinterpret_cast<const __m128i*>(w.bytes + 16 * i));
    acc.pairs[2 * i] = _mm_add_epi32(acc.pairs[2 * i], _mm_madd_epi16(_mm_unpacklo_epi8(v, none), x));
    acc.pairs[2 * i + 1] = _mm_add_epi32(acc.pairs[2 * i + 1], _mm_madd_epi16(_mm_unpackhi_epi8(v, none), x));
  }
  return acc;
}
SPOLIA_INLINE F to_float(const Acc& acc) {
  alignas(64) float x[16];
  for (int i = 0; i < 4; ++i) {
    const __m128 a = _mm_castsi128_ps(acc.pairs[2 * i]), b = _mm_castsi128_ps(acc.pairs[2 * i + 1]);
    const __m128i even = _mm_castps_si128(_mm_shuffle_ps(a, b, 0x88)), odd = _mm_castps_si128(_mm_shuffle_ps(a, b, 0xdd));
    _mm_store_ps(x + 4 * i, _mm_cvtepi32_ps(_mm_add_epi32(even, odd)));
  }
  return load(x);
}
#else
struct Acc { int32_t sums[16]; };
SPOLIA_INLINE Acc start(int32_t x) {
  Acc acc;
  for (int32_t& s : acc.sums) s = x;
  return acc;
}
SPOLIA_INLINE Acc dot(Acc acc, const W& w, const int8_t* a) {
  for (int c = 0; c < 16; ++c)
    for (int t = 0; t < 4; ++t) acc.sums[c] += int32_t(w.bytes[4 * c + t]) * a[t];
  return acc;
}
SPOLIA_INLINE F to_float(const Acc& acc) {
  alignas(64) float x[16];
  for (int c = 0; c < 16; ++c) x[c] = float(acc.sums[c]);
  return load(x);
}
#endif
SPOLIA_INLINE Acc dot_bytes(Acc acc, const W& w, const int8_t* a) { return dot(acc, w, a); }
SPOLIA_INLINE F dot_bf16(F acc, const uint8_t* p, const uint8_t* a) {
  Ints w;
  std::memcpy(&w, p, 64);
  int32_t two;
  std::memcpy(&two, a, 4);
  const Ints x = Ints{} + two;
  const Ints even = w << 16, odd = w & int32_t(0xffff0000), x_even = x << 16, x_odd = x & int32_t(0xffff0000);
  return acc + (F)even * (F)x_even + (F)odd * (F)x_odd;
}

// 32 values to the nearest of 255 steps, ties to even; returns the largest magnitude, NaN if a value is not finite.
SPOLIA_INLINE float quantise_32(const float* x, int8_t* q, int32_t (&sums)[2]) {
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
}

#endif

}  // namespace
}  // namespace spolia::SPOLIA_LEVEL
