// The few vector operations that attention needs, one implementation per level. +, -, * and / are the compiler's own.
//
// A `Vec` holds kLanes floats; kLanes divides a block's 16 tokens. kTileRows x kTileVecs accumulators of one register tile
// leave room for their operands in the level's register file; so do kWideRows x kWideVecs, for few rows.
#pragma once
#include <cstdint>
#include <cstring>

#include "half_vec.h"

#if defined(SPOLIA_LEVEL_avx512) || defined(SPOLIA_LEVEL_avx2)
// GCC 12 takes the undefined operand of its own AVX-512 intrinsics for a mistake of ours.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#elif defined(SPOLIA_LEVEL_neon)
#include <arm_neon.h>
#endif

namespace spolia::SPOLIA_LEVEL {
namespace {

#if defined(SPOLIA_LEVEL_avx512)

using Vec = __m512;
constexpr int kLanes = 16, kTileRows = 6, kTileVecs = 4, kWideRows = 3, kWideVecs = 8;

inline Vec splat(float x) { return _mm512_set1_ps(x); }
inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec round(Vec v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vec times_power_of_2(Vec v, Vec n) { return _mm512_scalef_ps(v, n); }
// Lanes [begin, end) of v, `fill` elsewhere, whatever v holds there.
inline Vec keep(Vec v, int begin, int end, float fill) {
  const uint32_t lanes = ((1u << end) - 1) & ~((1u << begin) - 1);
  return _mm512_mask_mov_ps(_mm512_set1_ps(fill), static_cast<__mmask16>(lanes), v);
}
inline Vec load_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
#if !defined(__AVX512BF16__)
// The even and the odd half of 16 interleaved bf16 pairs.
inline Vec load_bf16_even(const uint16_t* p) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16)); }
inline Vec load_bf16_odd(const uint16_t* p) {
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u))));
}
#endif

#elif defined(SPOLIA_LEVEL_avx2)

using Vec = __m256;
constexpr int kLanes = 8, kTileRows = 4, kTileVecs = 2, kWideRows = 3, kWideVecs = 4;

inline Vec splat(float x) { return _mm256_set1_ps(x); }
inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Vec round(Vec v) { return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vec times_power_of_2(Vec v, Vec n) {  // n >= -126, else 0
  const __m256i exponent = _mm256_cvtps_epi32(max(n, splat(-127.0f)) + splat(127.0f));
  return v * _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}
inline Vec keep(Vec v, int begin, int end, float fill) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i inside = _mm256_and_si256(_mm256_cmpgt_epi32(lane, _mm256_set1_epi32(begin - 1)),
                                          _mm256_cmpgt_epi32(_mm256_set1_epi32(end), lane));
  return _mm256_blendv_ps(splat(fill), v, _mm256_castsi256_ps(inside));
}
inline Vec load_f16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
// The even and the odd half of 8 interleaved bf16 pairs.
inline Vec load_bf16_even(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), 16));
}
inline Vec load_bf16_odd(const uint16_t* p) {
  const __m256i high = _mm256_set1_epi32(static_cast<int32_t>(0xffff0000u));
  return _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), high));
}

#else  // neon and generic: 128-bit vectors of the compiler, which SSE2 and NEON both have

typedef float Vec __attribute__((vector_size(16)));
typedef int32_t IntVec __attribute__((vector_size(16)));
typedef uint32_t WordVec __attribute__((vector_size(16)));

inline Vec splat(float x) { return Vec{x, x, x, x}; }
inline Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }
#if defined(SPOLIA_LEVEL_neon)
constexpr int kLanes = 4, kTileRows = 4, kTileVecs = 4, kWideRows = 2, kWideVecs = 8;
inline Vec fma(Vec a, Vec b, Vec c) { return vfmaq_f32(c, a, b); }
inline Vec max(Vec a, Vec b) { return vmaxq_f32(a, b); }
inline Vec round(Vec v) { return vrndnq_f32(v); }
inline Vec load_f16(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
#else  // no fused multiply-add is assumed
constexpr int kLanes = 4, kTileRows = 4, kTileVecs = 2, kWideRows = 2, kWideVecs = 4;
inline Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
inline Vec max(Vec a, Vec b) { return a > b ? a : b; }
inline Vec round(Vec v) {  // exact where |v| < 2^22, and larger values are integers or out of exp2's range
  const Vec magic = splat(12582912.0f), limit = splat(4194304.0f);
  const Vec near = (v + magic) - magic;
  return (v < limit) & (v > -limit) ? near : v;
}
inline Vec load_f16(const uint16_t* p) { return half_to_float(Words4{p[0], p[1], p[2], p[3]}); }
#endif
inline Vec times_power_of_2(Vec v, Vec n) {  // n >= -126, else 0
  const IntVec exponent = __builtin_convertvector(max(n, splat(-127.0f)), IntVec) + 127;
  return v * (Vec)(exponent << 23);
}
inline Vec keep(Vec v, int begin, int end, float fill) {
  const IntVec lane = {0, 1, 2, 3};
  return (lane >= begin) & (lane < end) ? v : splat(fill);
}
inline WordVec load_words(const uint16_t* p) {
  WordVec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline Vec load_bf16_even(const uint16_t* p) { return (Vec)(load_words(p) << 16); }
inline Vec load_bf16_odd(const uint16_t* p) { return (Vec)(load_words(p) & 0xffff0000u); }

#endif

inline float first(Vec v) { return v[0]; }

// Reductions over lanes in the fixed order of a binary tree: the upper half onto the lower.
struct Larger {
  template <class V>
  V operator()(V a, V b) const { return a > b ? a : b; }
};
struct Sum {
  template <class V>
  V operator()(V a, V b) const { return a + b; }
};
typedef float Quad __attribute__((vector_size(16)));
template <class Op>
inline float reduce(Quad v, Op op) {
  const Quad pair = op(v, __builtin_shufflevector(v, v, 2, 3, 2, 3));
  return op(pair, __builtin_shufflevector(pair, pair, 1, 1, 1, 1))[0];
}
#if defined(SPOLIA_LEVEL_avx512) || defined(SPOLIA_LEVEL_avx2)
template <class Op>
inline float reduce(__m256 v, Op op) {
  return reduce(op((Quad)_mm256_castps256_ps128(v), (Quad)_mm256_extractf128_ps(v, 1)), op);
}
#endif
#if defined(SPOLIA_LEVEL_avx512)
template <class Op>
inline float reduce(__m512 v, Op op) {
  return reduce(op(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1)), op);
}
#endif
inline float reduce_max(Vec v) { return reduce(v, Larger{}); }
inline float reduce_sum(Vec v) { return reduce(v, Sum{}); }

// 2^f - 1 on [-1/2, 1/2] as f * polynomial(f): the relative error of 2^f is 8e-8 (Degree 6) or 3e-6 (Degree 4, enough for a
// value that is rounded to bf16 next). Minimax coefficients, fitted for this file.
template <int Degree>
inline Vec fraction_minus_1(Vec f) {
  static_assert(Degree == 4 || Degree == 6);
  Vec p;
  if constexpr (Degree == 6) {
    p = splat(0x1.41fbbcp-13f);
    p = fma(p, f, splat(0x1.5f3e54p-10f));
    p = fma(p, f, splat(0x1.3b2d4cp-7f));
    p = fma(p, f, splat(0x1.c6aee8p-5f));
    p = fma(p, f, splat(0x1.ebfbdcp-3f));
    p = fma(p, f, splat(0x1.62e430p-1f));
  } else {
    p = splat(0x1.3a02ccp-7f);
    p = fma(p, f, splat(0x1.c9fc46p-5f));
    p = fma(p, f, splat(0x1.ec0378p-3f));
    p = fma(p, f, splat(0x1.62e12cp-1f));
  }
  return p * f;
}

// 2^x for finite x; exactly 1 at 0.
template <int Degree = 6>
inline Vec exp2(Vec x) {
  const Vec n = round(x);
  return times_power_of_2(fraction_minus_1<Degree>(x - n) + splat(1.0f), n);
}
inline float exp2(float x) { return first(exp2<6>(splat(x))); }

// tanh(x) = t / (t + 2), t = e^2x - 1, whose digits survive near 0.
inline Vec tanh(Vec x) {
  const Vec y = max(splat(-40.0f), -max(splat(-40.0f), -(x * splat(2.8853900817779268f))));
  const Vec n = round(y), power = times_power_of_2(splat(1.0f), n);
  const Vec t = fma(power, fraction_minus_1<6>(y - n), power - splat(1.0f));
  return t / (t + splat(2.0f));
}

}  // namespace
}  // namespace spolia::SPOLIA_LEVEL
