// How one layer of one block stores K and V, and the register tile that multiplies by them.
//
//     layer   [num_kv_heads] x { K, V }
//     K       [head_dim / pack][16 tokens][pack]     so that 16 tokens' scores are one vector
//     V       [16 / pack][width][pack tokens]        so that a row's weighted sum runs along head_dim
//
// pack = 2 for bf16 (a pair of products is one vdpbf16ps), 1 for f16 and f32. head_dim is padded to `depth` (a multiple of
// pack, zeros) in K and to `width` (a multiple of 16, never read into a result) in V. The layout is the same at every level.
#pragma once
#include <cstdint>
#include <cstring>

#include "attend.h"
#include "attend_vec.h"

namespace spolia::SPOLIA_LEVEL {
namespace {

inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

inline uint16_t to_bf16(float x) {  // to nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

// To nearest, ties to even. What is finite stays finite: a key beyond f16's range becomes the largest one and dominates, where
// infinity would turn into NaN. Infinity itself stays, as the fault that it is.
inline uint16_t to_f16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude == 0x7f800000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7bffu);
  if (magnitude >= 0x38800000u) {  // normal: rebase the exponent, round 13 bits away
    const uint32_t rebased = magnitude - 0x38000000u;
    return static_cast<uint16_t>(sign | ((rebased + 0xfffu + ((rebased >> 13) & 1)) >> 13));
  }
  // Subnormal: adding 0.5 leaves the rounded multiple of 2^-24 in the low bits.
  float y;
  std::memcpy(&y, &magnitude, 4);
  y += 0.5f;
  std::memcpy(&bits, &y, 4);
  return static_cast<uint16_t>(sign | (bits - 0x3f000000u));
}

// A KvType's elements, and how one operand of K or V meets one of Q or P.
//
// A step consumes `kPack` depths (of K) or tokens (of V): `kParts` multiplications, each with one 4-byte operand of the row,
// so a row of Q or P is kParts 4-byte values a step.
template <KvType Type>
struct Kv;

template <>
struct Kv<KvType::F32> {
  using Elem = float;
  static constexpr int kPack = 1, kParts = 1, kExpDegree = 6;
  static constexpr bool kRounded = false;
  static Elem encode(float x) { return x; }
  static Vec operand(const Elem* p, int) { return load(p); }
  static Vec multiply_add(Vec kv, Vec row, Vec sum) { return fma(kv, row, sum); }
};

template <>
struct Kv<KvType::F16> {
  using Elem = uint16_t;
  static constexpr int kPack = 1, kParts = 1, kExpDegree = 6;
  static constexpr bool kRounded = false;
  static Elem encode(float x) { return to_f16(x); }
  static Vec operand(const Elem* p, int) { return load_f16(p); }
  static Vec multiply_add(Vec kv, Vec row, Vec sum) { return fma(kv, row, sum); }
};

#if defined(SPOLIA_LEVEL_avx512)
// vdpbf16ps: rows of Q and P are rounded to bf16, two to an operand.
template <>
struct Kv<KvType::BF16> {
  using Elem = uint16_t;
  static constexpr int kPack = 2, kParts = 1, kExpDegree = 4;
  static constexpr bool kRounded = true;
  static Elem encode(float x) { return to_bf16(x); }
  static Vec operand(const Elem* p, int) { return _mm512_loadu_ps(p); }
  static Vec multiply_add(Vec kv, Vec row, Vec sum) { return _mm512_dpbf16_ps(sum, (__m512bh)kv, (__m512bh)row); }
};
#else
template <>
struct Kv<KvType::BF16> {
  using Elem = uint16_t;
  static constexpr int kPack = 2, kParts = 2, kExpDegree = 6;
  static constexpr bool kRounded = false;
  static Elem encode(float x) { return to_bf16(x); }
  static Vec operand(const Elem* p, int part) { return part ? load_bf16_odd(p) : load_bf16_even(p); }
  static Vec multiply_add(Vec kv, Vec row, Vec sum) { return fma(kv, row, sum); }
};
#endif

struct Layout {
  int64_t depth, width;              // head_dim as K and as V are padded
  size_t k_bytes, v_bytes, layer_bytes;  // of one head, one head, all heads
};

template <class K>
inline Layout layout_of(const AttendShape& shape) {
  Layout out;
  out.depth = round_up(shape.head_dim, 2);
  out.width = round_up(shape.head_dim, kBlock);
  out.k_bytes = static_cast<size_t>(kBlock * out.depth) * sizeof(typename K::Elem);
  out.v_bytes = static_cast<size_t>(kBlock * out.width) * sizeof(typename K::Elem);
  out.layer_bytes = (out.k_bytes + out.v_bytes) * static_cast<size_t>(shape.num_kv_heads);
  return out;
}

// sums[r][c] += rows[r] x columns c, over `num_steps` steps: the one inner loop of both Q K^T and P V. Each sum is a chain of
// its own in the order of the steps, so it does not depend on the tile it is computed in.
template <class K, int Rows, int Vecs>
[[gnu::always_inline]] inline void multiply(Vec (&sums)[Rows][Vecs], const float* rows, int64_t ld_rows,
                                            const typename K::Elem* const (&columns)[Vecs], int64_t step_elems,
                                            int64_t num_steps) {
  for (int64_t s = 0; s < num_steps; ++s) {
#pragma GCC unroll 2
    for (int part = 0; part < K::kParts; ++part) {
      Vec kv[Vecs];
#pragma GCC unroll 8
      for (int c = 0; c < Vecs; ++c) kv[c] = K::operand(columns[c] + s * step_elems, part);
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r) {
        const Vec row = splat(rows[r * ld_rows + s * K::kParts + part]);
#pragma GCC unroll 8
        for (int c = 0; c < Vecs; ++c) sums[r][c] = K::multiply_add(kv[c], row, sums[r][c]);
      }
    }
  }
}

// scores[r][c] = q[r] . k[c]: `columns` are Vecs vectors of tokens, each at its block's first depth.
template <class K, int Rows, int Vecs>
void score_tile(const float* q, int64_t ld_q, const typename K::Elem* const* columns, int64_t num_steps, float* scores,
                int64_t ld_scores) {
  Vec sums[Rows][Vecs];
  const typename K::Elem* pointers[Vecs];
#pragma GCC unroll 8
  for (int c = 0; c < Vecs; ++c) pointers[c] = columns[c];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < Vecs; ++c) sums[r][c] = splat(0.0f);
  multiply<K, Rows, Vecs>(sums, q, ld_q, pointers, kBlock * K::kPack, num_steps);
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < Vecs; ++c) store(scores + r * ld_scores + c * kLanes, sums[r][c]);
}

// out[r] += p[r] x V over steps [step_begin, step_end) of a split: blocks[i] is block i's V, at the first column wanted.
template <class K, int Rows, int Vecs>
void weigh_tile(const float* p, int64_t ld_p, const typename K::Elem* const* blocks, int64_t column, int64_t width,
                int64_t step_begin, int64_t step_end, float* out, int64_t ld_out) {
  constexpr int64_t kSteps = kBlock / K::kPack;
  Vec sums[Rows][Vecs];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < Vecs; ++c) sums[r][c] = load(out + r * ld_out + c * kLanes);
  const int64_t step_elems = width * K::kPack;
  for (int64_t s = step_begin; s < step_end;) {
    const int64_t block_end = (s / kSteps + 1) * kSteps;
    const int64_t stop = block_end < step_end ? block_end : step_end;
    const typename K::Elem* base = blocks[s / kSteps] + (s % kSteps) * step_elems + column * K::kPack;
    const typename K::Elem* pointers[Vecs];
#pragma GCC unroll 8
    for (int c = 0; c < Vecs; ++c) pointers[c] = base + c * kLanes * K::kPack;
    multiply<K, Rows, Vecs>(sums, p + s * K::kParts, ld_p, pointers, step_elems, stop - s);
    s = stop;
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < Vecs; ++c) store(out + r * ld_out + c * kLanes, sums[r][c]);
}

// Every size of register tile, by number of rows and of vectors less one.
template <class K>
struct Tiles {
  decltype(&score_tile<K, 1, 1>) score[kTileRows][kTileVecs] = {};
  decltype(&weigh_tile<K, 1, 1>) weigh[kTileRows][kTileVecs] = {};

  constexpr Tiles() { fill<kTileRows, kTileVecs>(); }

 private:
  template <int Rows, int Vecs>
  constexpr void fill() {
    score[Rows - 1][Vecs - 1] = &score_tile<K, Rows, Vecs>;
    weigh[Rows - 1][Vecs - 1] = &weigh_tile<K, Rows, Vecs>;
    if constexpr (Vecs > 1) fill<Rows, Vecs - 1>();
    else if constexpr (Rows > 1) fill<Rows - 1, kTileVecs>();
  }
};

template <class K>
constexpr Tiles<K> kTiles{};

}  // namespace
}  // namespace spolia::SPOLIA_LEVEL
