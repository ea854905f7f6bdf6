// How one layer of one block stores K and V, and the register tile that multiplies by them.
//
//     layer   [num_kv_heads] x { K, V }
//     K       [head_dim / pack][16 tokens][pack]     so that 16 tokens' scores are one vector
//     V       [16 / pack][width][pack tokens]        so that a row's weighted sum runs along head_dim
//
// pack = 2 for bf16 (a pair of products is one vdpbf16ps) and int8, 1 for f16 and f32. int8 has each token's scales behind V: those
// of K, then those of V, 16 bf16 each. head_dim is padded to `depth` (a multiple of
// pack, zeros) in K and to `width` (a multiple of 16, never read into a result) in V. The layout is the same at every level.
#pragma once
#include <cstdint>
#include <cstring>

#include "attend.h"
#include "attend_vec.h"

namespace spolia::SPOLIA_LEVEL {
namespace {

constexpr int64_t kSplit = 256;  // tokens; part of the numerics: attend.h
constexpr int64_t kSplitBlocks = kSplit / kBlock;
constexpr int kUnit = 32;  // tokens that softmax takes at a time

inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// The encoders have no branches, so that loops over them become vector loops.
inline uint16_t to_bf16(float x) {  // to nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1);
  return static_cast<uint16_t>((is_nan ? bits | 0x400000u : rounded) >> 16);
}

// To nearest, ties to even. What is finite stays finite: a key beyond f16's range becomes the largest one and dominates, where
// infinity would turn into NaN. Infinity itself stays, as the fault that it is.
inline uint16_t to_f16(float x) {
  uint32_t bits, subnormal;
  std::memcpy(&bits, &x, 4);
  const uint32_t sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  const uint32_t rebased = magnitude - 0x38000000u;
  const uint32_t normal = (rebased + 0xfffu + ((rebased >> 13) & 1)) >> 13;
  float y;  // adding 0.5 leaves the rounded multiple of 2^-24 in the low bits
  std::memcpy(&y, &magnitude, 4);
  y += 0.5f;
  std::memcpy(&subnormal, &y, 4);
  uint32_t half = magnitude < 0x38800000u ? subnormal - 0x3f000000u : normal;
  half = magnitude >= 0x477ff000u ? 0x7bffu : half;
  half = magnitude >= 0x7f800000u ? 0x7c00u : half;
  half = magnitude > 0x7f800000u ? 0x7e00u : half;
  return static_cast<uint16_t>(sign | half);
}

// A row of q `[n]` as operands, kParts 4-byte values a step, zeros after n; for rows that stay float32.
inline void pack_row_as_it_is(const float* q, int64_t n, float* out) {
  std::memcpy(out, q, static_cast<size_t>(n) * sizeof(float));
  if (n % 2) out[n] = 0.0f;
}

// p[t, t + kUnit) = weight(t...), for rows of P that stay float32; returns their lanes added to `sums`.
template <class Weight>
inline Vec store_weights_as_they_are(float* p, int64_t t, const Weight& weight, Vec sums) {
#pragma GCC unroll 8
  for (int i = 0; i < kUnit; i += kLanes) {
    const Vec w = weight(t + i);
    store(p + t + i, w);
    sums = sums + w;
  }
  return sums;
}

// A KvType's elements, and how one operand of K or V meets one of Q or P.
//
// A step consumes `kPack` depths (of K) or tokens (of V): `kParts` multiplications, each with one 4-byte operand of the row,
// so a row of Q or P is kParts 4-byte values a step.
template <KvType Type>
struct Kv;

template <>
struct Kv<KvType::F32> {
  using Tile = Kv;
  using Elem = float;
  static constexpr int kPack = 1, kParts = 1, kExpDegree = 6;
  static Elem encode(float x) { return x; }
  static Vec operand(const Elem* p, int) { return load(p); }
  static Vec multiply_add(Vec kv, Vec row, Vec sum) { return fma(kv, row, sum); }
  static void pack_row(const float* q, int64_t n, float* out) { pack_row_as_it_is(q, n, out); }
  template <class Weight>
  static Vec store_weights(float* p, int64_t t, const Weight& weight, Vec sums) {
    return store_weights_as_they_are(p, t, weight, sums);
  }
};

template <>
struct Kv<KvType::F16> {
  using Tile = Kv;
  using Elem = uint16_t;
  static constexpr int kPack = 1, kParts = 1, kExpDegree = 6;
  static Elem encode(float x) { return to_f16(x); }
  static Vec operand(const Elem* p, int) { return load_f16(p); }
  static Vec multiply_add(Vec kv, Vec row, Vec sum) { return fma(kv, row, sum); }
  static void pack_row(const float* q, int64_t n, float* out) { pack_row_as_it_is(q, n, out); }
  template <class Weight>
  static Vec store_weights(float* p, int64_t t, const Weight& weight, Vec sums) {
    return store_weights_as_they_are(p, t, weight, sums);
  }
};

#if defined(__AVX512BF16__)
// vdpbf16ps: rows of Q and P are rounded to bf16, two to an operand.
template <>
struct Kv<KvType::BF16> {
  using Tile = Kv;
  using Elem = uint16_t;
  static constexpr int kPack = 2, kParts = 1, kExpDegree = 4;
  static Elem encode(float x) { return to_bf16(x); }
  static Vec operand(const Elem* p, int) { return _mm512_loadu_ps(p); }
  static Vec multiply_add(Vec kv, Vec row, Vec sum) { return _mm512_dpbf16_ps(sum, (__m512bh)kv, (__m512bh)row); }
  static void pack_row(const float* q, int64_t n, float* out) {
    const auto some = [q, n](int64_t d) {
      const int64_t left = n - d;
      return _mm512_maskz_loadu_ps(left >= kLanes ? 0xffff : left > 0 ? (1u << left) - 1 : 0, q + d);
    };
    for (int64_t d = 0; d < n; d += 2 * kLanes)
      _mm512_storeu_si512(out + d / 2, (__m512i)_mm512_cvtne2ps_pbh(some(d + kLanes), some(d)));
  }
  // The sum is that of the rounded weights, so that these still add to one.
  template <class Weight>
  static Vec store_weights(float* p, int64_t t, const Weight& weight, Vec sums) {
    const Vec low = weight(t), high = weight(t + kLanes);
    const __m512bh both = _mm512_cvtne2ps_pbh(high, low);
    _mm512_storeu_si512(p + t / 2, (__m512i)both);
    return _mm512_dpbf16_ps(sums, both, (__m512bh)_mm512_set1_epi32(0x3f803f80));
  }
};
#else
template <>
struct Kv<KvType::BF16> {
  using Tile = Kv;
  using Elem = uint16_t;
  static constexpr int kPack = 2, kParts = 2, kExpDegree = 6;
  static Elem encode(float x) { return to_bf16(x); }
  static Vec operand(const Elem* p, int part) { return part ? load_bf16_odd(p) : load_bf16_even(p); }
  static Vec multiply_add(Vec kv, Vec row, Vec sum) { return fma(kv, row, sum); }
  static void pack_row(const float* q, int64_t n, float* out) { pack_row_as_it_is(q, n, out); }
  template <class Weight>
  static Vec store_weights(float* p, int64_t t, const Weight& weight, Vec sums) {
    return store_weights_as_they_are(p, t, weight, sums);
  }
};
#endif

// Integers, which become bf16 before they meet an operand.
template <>
struct Kv<KvType::INT8> {
  using Tile = Kv<KvType::BF16>;
  using Elem = int8_t;
  static constexpr int kPack = Tile::kPack;
};

// Whether the elements of a token have a scale.
template <class K>
constexpr bool kScaled = sizeof(typename K::Elem) == 1;

// x [n] times a Hadamard matrix over its last power of two, chunk by chunk: orthonormal, and its own inverse.
inline void rotate(float* x, int64_t n) {
  const int64_t size = n & -n;
  const float factor = 1.0f / __builtin_sqrtf(static_cast<float>(size));
  for (float* chunk = x; chunk < x + n; chunk += size)
    for (int64_t half = 1; half < size; half *= 2)
      for (int64_t i = 0; i < size; i += 2 * half)
        for (int64_t j = i; j < i + half; ++j) {
          const float a = chunk[j], b = chunk[j + half];
          chunk[j] = a + b, chunk[j + half] = a - b;
        }
  for (int64_t i = 0; i < n; ++i) x[i] *= factor;
}

// A token's x [n] rotated, as integers [n]; returns their scale, a bf16: NaN where x holds what is not finite.
inline uint16_t to_int8(const float* x, int64_t n, int8_t* out) {
  float turned[kMostScaledDim];
  std::memcpy(turned, x, static_cast<size_t>(n) * sizeof(float));
  rotate(turned, n);
  uint32_t largest_bits = 0;  // magnitudes order as their bits do, NaN above all
  for (int64_t i = 0; i < n; ++i) {
    uint32_t bits;
    std::memcpy(&bits, turned + i, 4);
    bits &= 0x7fffffffu;
    largest_bits = bits > largest_bits ? bits : largest_bits;
  }
  if (largest_bits >= 0x7f800000u) {
    std::memset(out, 0, static_cast<size_t>(n));
    return 0x7fc0;
  }
  float largest, scale;
  std::memcpy(&largest, &largest_bits, 4);
  const uint16_t stored = to_bf16(largest / 127.0f);
  const uint32_t scale_bits = static_cast<uint32_t>(stored) << 16;
  std::memcpy(&scale, &scale_bits, 4);
  const float inverse = scale > 0x1p-126f ? 1.0f / scale : 0.0f;
  for (int64_t i = 0; i < n; ++i) {
    float y = turned[i] * inverse;
    y = y < 127.0f ? y : 127.0f;
    y = y > -127.0f ? y : -127.0f;
    out[i] = static_cast<int8_t>(static_cast<int32_t>((y + 12582912.0f) - 12582912.0f));  // to nearest, ties to even
  }
  return stored;
}

inline void widen(const int8_t* in, int64_t n, uint16_t* out) {
  for (int64_t i = 0; i < n; ++i) {
    const float x = in[i];
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    out[i] = static_cast<uint16_t>(bits >> 16);
  }
}

struct Layout {
  int64_t depth, width;              // head_dim as K and as V are padded
  size_t k_bytes, v_bytes, head_bytes, layer_bytes;  // of one head: K, V, both with scales; of all heads
};

template <class K>
inline Layout layout_of(const AttendShape& shape) {
  Layout out;
  out.depth = round_up(shape.head_dim, kScaled<K> ? 4 : 2);  // so that a layer is whole lines of 64 bytes
  out.width = round_up(shape.head_dim, kBlock);
  out.k_bytes = static_cast<size_t>(kBlock * out.depth) * sizeof(typename K::Elem);
  out.v_bytes = static_cast<size_t>(kBlock * out.width) * sizeof(typename K::Elem);
  out.head_bytes = out.k_bytes + out.v_bytes + (kScaled<K> ? 2 * kBlock * sizeof(uint16_t) : 0);
  out.layer_bytes = out.head_bytes * static_cast<size_t>(shape.num_kv_heads);
  return out;
}

// sums[r][c] += rows[r] x column c, one step: the inner loop of both Q K^T and P V. `column(c)` is the step's vector c. Each sum is
// a chain of its own in the order of the steps, so it does not depend on the tile it is computed in.
template <class K, int Rows, int Vecs, class Column>
[[gnu::always_inline]] inline void multiply_step(Vec (&sums)[Rows][Vecs], const float* rows, int64_t ld_rows,
                                                 const Column& column) {
#pragma GCC unroll 2
  for (int part = 0; part < K::kParts; ++part) {
    Vec kv[Vecs];
#pragma GCC unroll 8
    for (int c = 0; c < Vecs; ++c) kv[c] = K::operand(column(c), part);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      const Vec row = splat(rows[r * ld_rows + part]);
#pragma GCC unroll 8
      for (int c = 0; c < Vecs; ++c) sums[r][c] = K::multiply_add(kv[c], row, sums[r][c]);
    }
  }
}

// scores[r][c] = q[r] . k[c]: `columns` are Vecs vectors of tokens, each at its block's first depth.
//
// V lies `v_bytes_on` bytes behind K and is wanted next: each line of K asks for the line of V at its side. Blocks are too
// far apart for the hardware to foresee: several read side by side, K and V both, come at the rate of one long read.
template <class K, int Rows, int Vecs>
void score_tile(const float* q, int64_t ld_q, const typename K::Elem* const* columns, int64_t num_steps, size_t v_bytes_on,
                float* scores) {
  constexpr int64_t kStepElems = kBlock * K::kPack;
  Vec sums[Rows][Vecs];
  const typename K::Elem* pointers[Vecs];
#pragma GCC unroll 8
  for (int c = 0; c < Vecs; ++c) pointers[c] = columns[c];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < Vecs; ++c) sums[r][c] = splat(0.0f);
  for (int64_t s = 0; s < num_steps; ++s) {
#pragma GCC unroll 8
    for (int c = 0; c < Vecs; c += kBlock / kLanes)
      __builtin_prefetch(reinterpret_cast<const uint8_t*>(pointers[c] + s * kStepElems) + v_bytes_on, 0, 2);
    multiply_step<K>(sums, q + s * K::kParts, ld_q, [&](int c) { return pointers[c] + s * kStepElems; });
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < Vecs; ++c) store(scores + r * kSplit + c * kLanes, sums[r][c]);
}

// out[r] += p[r] x V over steps [begin, end) of a split: blocks[i] is block i's V, `step_elems` from a step to the next, and
// `column` the first element wanted of each. As K asks for V, so V does for the K of the split that comes next: next_k[i], or null.
template <class K, int Rows, int Vecs>
void weigh_tile(const float* p, const typename K::Elem* const* blocks, int64_t column, int64_t step_elems, int64_t begin,
                int64_t end, const uint8_t* const* next_k, float* out, int64_t ld_out) {
  constexpr int64_t kSteps = kBlock / K::kPack, kStride = kLanes * K::kPack, kElemBytes = sizeof(typename K::Elem);
  Vec sums[Rows][Vecs];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < Vecs; ++c) sums[r][c] = load(out + r * ld_out + c * kLanes);
  for (int64_t block = begin / kSteps; block * kSteps < end; ++block) {
    const int64_t from = begin > block * kSteps ? begin : block * kSteps;
    const int64_t to = end < (block + 1) * kSteps ? end : (block + 1) * kSteps;
    int64_t at = (from - block * kSteps) * step_elems + column;
    const auto step = [&](int64_t s) __attribute__((always_inline)) {
      multiply_step<K>(sums, p + s * K::kParts, kSplit, [&](int c) { return blocks[block] + at + c * kStride; });
    };
    if (const uint8_t* next = next_k[block]) {
      for (int64_t s = from; s < to; ++s, at += step_elems) {
#pragma GCC unroll 8
        for (int c = 0; c < Vecs; c += kBlock / kLanes) __builtin_prefetch(next + (at + c * kStride) * kElemBytes, 0, 2);
        step(s);
      }
    } else {
      for (int64_t s = from; s < to; ++s, at += step_elems) step(s);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < Vecs; ++c) store(out + r * ld_out + c * kLanes, sums[r][c]);
}

// How many vectors wide a register tile of `rows` rows may be.
constexpr int64_t tile_vecs(int64_t rows) { return rows <= kWideRows ? kWideVecs : kTileVecs; }

// Every size of register tile, by number of rows and of vectors less one.
template <class K>
struct Tiles {
  decltype(&score_tile<K, 1, 1>) score[kTileRows][kWideVecs] = {};
  decltype(&weigh_tile<K, 1, 1>) weigh[kTileRows][kWideVecs] = {};

  constexpr Tiles() { fill<kTileRows, tile_vecs(kTileRows)>(); }

 private:
  template <int Rows, int Vecs>
  constexpr void fill() {
    score[Rows - 1][Vecs - 1] = &score_tile<K, Rows, Vecs>;
    weigh[Rows - 1][Vecs - 1] = &weigh_tile<K, Rows, Vecs>;
    if constexpr (Vecs > 1) fill<Rows, Vecs - 1>();
    else if constexpr (Rows > 1) fill<Rows - 1, tile_vecs(Rows - 1)>();
  }
};

template <class K>
constexpr Tiles<K> kTiles{};

}  // namespace
}  // namespace spolia::SPOLIA_LEVEL
