// How rows and weights lie in memory: the prepared row, the packed form of each weight type, and the packing of it.
//
// A packed tile is 16 output columns, block by block of 32 k (or k by k for float types), nothing re-rounded:
//
//   nibbles  4 vectors of 64 bytes: byte 4c + t of vector j holds k = 4j + t (low) and k = 16 + 4j + t (high) of column c,
//            which is a transpose of the file's own 16 bytes
//   Q5       + 8 masks of 64 bits: bit 4c + t of mask g is the fifth bit of k = 4g + t
//   Q8_0     8 vectors of whole bytes: vector g holds k = 4g + t
//   Q6_K     + 2 vectors of 2-bit fields: field f of vector h belongs to nibbles g = 4h + f
//   scales   behind the values, 16 float16 (or 16 bytes) a kind; of K-quants, d and dmin open each run of eight blocks
#pragma once
#include <type_traits>

#include "linear_vec.h"

namespace spolia::SPOLIA_LEVEL {
namespace {

constexpr int64_t kBlockK = 32, kSuperK = 256, kTile = 16;

// ---- Rows ------------------------------------------------------------------------------------------------------------

// 32 values of a row: q, and what a product needs of them besides.
struct RowTail {
  float d;            // scale
  float d_sum;        // scale * sum of q
  int32_t minus_8, minus_16, minus_128;  // -zero_point * sum of q
  int32_t minus_32[2];                   // -32 * sum of q, of each half
  int32_t unused;
};
// q = q[0], or, in 16 bits, kRowBase * q[0] + q[1]; each plane in [-127, 127].
template <int planes>
struct alignas(64) Row : RowTail {
  static constexpr int num_planes = planes;
  int8_t q[planes][32];
};
using Row8 = Row<1>;
using Row16 = Row<2>;
constexpr int kRowBase = 254;
static_assert(sizeof(Row8) == 64 && sizeof(Row16) == 128);

// ---- Weights ---------------------------------------------------------------------------------------------------------

constexpr int64_t kNibbles = 256, kHalves = 32, kBytes = 16;  // of 16 columns: 32 nibbles, one float16, one byte each

struct NoBits {
  static constexpr int count = 0;
  static constexpr int64_t bytes = 0;
  template <int g> SPOLIA_INLINE W apply(W w, const uint8_t*) { return w; }
};
struct FifthBit {
  static constexpr int count = 1;
  static constexpr int64_t bytes = 64;
  template <int g> SPOLIA_INLINE W apply(W w, const uint8_t* bits) { return add_fifth_bit(w, bits + 8 * g); }
};
struct TwoBits {
  static constexpr int count = 2;
  static constexpr int64_t bytes = 128;
  template <int g> SPOLIA_INLINE W apply(W w, const uint8_t* bits) { return add_two_bits<g % 4>(w, load_bytes(bits + 64 * (g / 4))); }
};
// Nibble vector j holds weights j (low) and j + 4 (high); the further bits lie behind the nibbles.
template <class Bits, int g>
SPOLIA_INLINE W nibble_weights(const uint8_t* p) {
  const W both = load_bytes(p + 64 * (g % 4));
  return Bits::template apply<g>(g < 4 ? low_nibbles(both) : high_nibbles(both), p + kNibbles);
}

// A type says how a part of 32 k at `p` reads: `weights<g>`, for k = 4g .. 4g + 3; `scale<s>`, of the s-th of `num_scales`
// equal pieces; `min`, if it has one; and where the row keeps the piece's zero-point term. Parts of one block share `Head`.
struct NoHead {};

// One scale for 32 k, and perhaps a minimum: Q4_0, Q4_1, Q5_0, Q5_1.
template <class Bits, int32_t RowTail::* zero_point_term, bool minimum>
struct Simple {
  using Head = NoHead;
  static constexpr int bits = 4 + Bits::count, num_parts = 1, num_scales = 1;
  static constexpr bool has_min = minimum;
  static constexpr int64_t head_bytes = 0, part_bytes = kNibbles + Bits::bytes + (has_min ? 2 : 1) * kHalves;

  SPOLIA_INLINE Head head(const uint8_t*) { return {}; }
  template <int g> SPOLIA_INLINE W weights(const uint8_t* p) { return nibble_weights<Bits, g>(p); }
  template <int s> SPOLIA_INLINE F scale(const uint8_t* p, Head) { return load_half(p + kNibbles + Bits::bytes); }
  SPOLIA_INLINE F min(const uint8_t* p, Head) { return load_half(p + kNibbles + Bits::bytes + kHalves); }
  template <int s> SPOLIA_INLINE int32_t zero_point(const RowTail& x) { return has_min ? 0 : x.*zero_point_term; }
};

struct Bytes {  // Q8_0
  using Head = NoHead;
  static constexpr int bits = 8, num_parts = 1, num_scales = 1;
  static constexpr bool has_min = false;
  static constexpr int64_t head_bytes = 0, part_bytes = 2 * kNibbles + kHalves;

  SPOLIA_INLINE Head head(const uint8_t*) { return {}; }
  template <int g> SPOLIA_INLINE W weights(const uint8_t* p) { return load_bytes(p + 64 * g); }
  template <int s> SPOLIA_INLINE F scale(const uint8_t* p, Head) { return load_half(p + 2 * kNibbles); }
  template <int s> SPOLIA_INLINE int32_t zero_point(const RowTail& x) { return kSignedBytes ? 0 : x.minus_128; }
};

// Eight parts with 6-bit scales and minima under one d and one dmin: Q4_K, Q5_K.
template <class Bits>
struct Super {
  struct Head { F d, minus_dmin; };
  static constexpr int bits = 4 + Bits::count, num_parts = 8, num_scales = 1;
  static constexpr bool has_min = true;
  static constexpr int64_t head_bytes = 2 * kHalves, part_bytes = kNibbles + Bits::bytes + 2 * kBytes;

  SPOLIA_INLINE Head head(const uint8_t* p) { return {load_half(p), mul(load_half(p + kHalves), splat(-1.0f))}; }
  template <int g> SPOLIA_INLINE W weights(const uint8_t* p) { return nibble_weights<Bits, g>(p); }
  template <int s> SPOLIA_INLINE F scale(const uint8_t* p, Head h) { return mul(h.d, load_u8(p + kNibbles + Bits::bytes)); }
  SPOLIA_INLINE F min(const uint8_t* p, Head h) { return mul(h.minus_dmin, load_u8(p + kNibbles + Bits::bytes + kBytes)); }
  template <int s> SPOLIA_INLINE int32_t zero_point(const RowTail&) { return 0; }
};

// Eight parts of two scales each, for 16 k, under one d: Q6_K. The low nibbles are the first 16 k of a part.
struct Sixteens {
  struct Head { F d; };
  static constexpr int bits = 6, num_parts = 8, num_scales = 2;
  static constexpr bool has_min = false;
  static constexpr int64_t head_bytes = kHalves, part_bytes = kNibbles + TwoBits::bytes + 2 * kBytes;

  SPOLIA_INLINE Head head(const uint8_t* p) { return {load_half(p)}; }
  template <int g> SPOLIA_INLINE W weights(const uint8_t* p) { return nibble_weights<TwoBits, g>(p); }
  template <int s> SPOLIA_INLINE F scale(const uint8_t* p, Head h) { return mul(h.d, load_i8(p + kNibbles + TwoBits::bytes + s * kBytes)); }
  template <int s> SPOLIA_INLINE int32_t zero_point(const RowTail& x) { return x.minus_32[s]; }
};

// Parts of another type as `unpack` left them.
template <class Type>
struct Unpacked {
  struct alignas(64) Part {
    uint8_t weights[8 * 64];
    float factors[2][kTile];  // scale, and the second scale or the minimum
  };
  using Head = NoHead;
  static constexpr int bits = Type::bits, num_parts = 1, num_scales = Type::num_scales;
  static constexpr bool has_min = Type::has_min;
  static constexpr int64_t head_bytes = 0, part_bytes = sizeof(Part);

  SPOLIA_INLINE const Part& at(const uint8_t* p) { return *reinterpret_cast<const Part*>(p); }
  SPOLIA_INLINE Head head(const uint8_t*) { return {}; }
  template <int g> SPOLIA_INLINE W weights(const uint8_t* p) { return load_bytes(at(p).weights + 64 * g); }
  template <int s> SPOLIA_INLINE F scale(const uint8_t* p, Head) { return load(at(p).factors[s]); }
  SPOLIA_INLINE F min(const uint8_t* p, Head) { return load(at(p).factors[1]); }
  template <int s> SPOLIA_INLINE int32_t zero_point(const RowTail& x) { return Type::template zero_point<s>(x); }

  SPOLIA_INLINE void unpack(const uint8_t* p, typename Type::Head head, Part& to) {
    unrolled<0, 8>([&]<int g>() SPOLIA_LAMBDA { store_bytes(to.weights + 64 * g, Type::template weights<g>(p)); });
    unrolled<0, num_scales>([&]<int s>() SPOLIA_LAMBDA { store(to.factors[s], Type::template scale<s>(p, head)); });
    if constexpr (has_min) store(to.factors[1], Type::min(p, head));
  }
};

using Q4_0 = Simple<NoBits, &RowTail::minus_8, false>;
using Q4_1 = Simple<NoBits, &RowTail::minus_8, true>;
using Q5_0 = Simple<FifthBit, &RowTail::minus_16, false>;
using Q5_1 = Simple<FifthBit, &RowTail::minus_16, true>;
using Q8_0 = Bytes;
using Q4_K = Super<NoBits>;
using Q5_K = Super<FifthBit>;
using Q6_K = Sixteens;

template <class Type>
constexpr int64_t kTypeK = kBlockK * Type::num_parts;
template <class Type>
constexpr int64_t kTypeBytes = Type::head_bytes + Type::num_parts * Type::part_bytes;

template <class Type>
size_t packed_tile_bytes(int64_t k) { return size_t(k / kTypeK<Type> * kTypeBytes<Type>); }

// ---- Packing: values and scales unchanged ----------------------------------------------------------------------------

SPOLIA_INLINE uint32_t word(const uint8_t* p) {
  uint32_t x;
  std::memcpy(&x, p, 4);
  return x;
}
SPOLIA_INLINE void put_word(uint8_t* p, uint32_t x) { std::memcpy(p, &x, 4); }
SPOLIA_INLINE void copy_half(uint8_t* to, int64_t column, const uint8_t* from) { std::memcpy(to + 2 * column, from, 2); }

// `qs` as in the file: low nibbles are values 0-15, high ones 16-31. Word j of a column goes to vector j.
SPOLIA_INLINE void put_nibbles(uint8_t* to, int64_t column, const uint8_t* qs) {
  for (int j = 0; j < 4; ++j) put_word(to + 64 * j + 4 * column, word(qs + 4 * j));
}
SPOLIA_INLINE void put_fifth_bits(uint8_t* to, int64_t column, uint32_t bits) {  // bit k of `bits`; masks start as zeros
  for (int g = 0; g < 8; ++g) to[8 * g + column / 2] = uint8_t(to[8 * g + column / 2] | (((bits >> (4 * g)) & 15) << (4 * (column % 2))));
}
// Nibbles from the low (0) or high (4) halves of 32 bytes in order of k.
SPOLIA_INLINE void put_half_bytes(uint8_t* to, int64_t column, const uint8_t* qs, int shift) {
  for (int j = 0; j < 4; ++j) {
    const uint32_t low = (word(qs + 4 * j) >> shift) & 0x0f0f0f0f, high = (word(qs + 16 + 4 * j) >> shift) & 0x0f0f0f0f;
    put_word(to + 64 * j + 4 * column, low | (high << 4));
  }
}
// The 6-bit scale and minimum of group j: see the file format.
SPOLIA_INLINE void six_bit_scales(const uint8_t* s, int j, uint8_t& scale, uint8_t& min) {
  if (j < 4) {
    scale = s[j] & 63;
    min = s[j + 4] & 63;
  } else {
    scale = uint8_t((s[j + 4] & 15) | ((s[j - 4] >> 6) << 4));
    min = uint8_t((s[j + 4] >> 4) | ((s[j] >> 6) << 4));
  }
}

// Each: the file's bytes of one block, the column inside the tile, the packed block (zeros where no column wrote).
struct PackQ4_0 {
  using Type = Q4_0;
  static constexpr int64_t file_bytes = 18;
  static void block(const uint8_t* s, int64_t c, uint8_t* to) { put_nibbles(to, c, s + 2); copy_half(to + kNibbles, c, s); }
};
struct PackQ4_1 {
  using Type = Q4_1;
  static constexpr int64_t file_bytes = 20;
  static void block(const uint8_t* s, int64_t c, uint8_t* to) {
    put_nibbles(to, c, s + 4);
    copy_half(to + kNibbles, c, s);
    copy_half(to + kNibbles + kHalves, c, s + 2);
  }
};
struct PackQ5_0 {
  using Type = Q5_0;
  static constexpr int64_t file_bytes = 22;
  static void block(const uint8_t* s, int64_t c, uint8_t* to) {
    put_nibbles(to, c, s + 6);
    put_fifth_bits(to + kNibbles, c, word(s + 2));
    copy_half(to + kNibbles + FifthBit::bytes, c, s);
  }
};
struct PackQ5_1 {
  using Type = Q5_1;
  static constexpr int64_t file_bytes = 24;
  static void block(const uint8_t* s, int64_t c, uint8_t* to) {
    put_nibbles(to, c, s + 8);
    put_fifth_bits(to + kNibbles, c, word(s + 4));
    copy_half(to + kNibbles + FifthBit::bytes, c, s);
    copy_half(to + kNibbles + FifthBit::bytes + kHalves, c, s + 2);
  }
};
struct PackQ8_0 {
  using Type = Q8_0;
  static constexpr int64_t file_bytes = 34;
  static void block(const uint8_t* s, int64_t c, uint8_t* to) {
    for (int g = 0; g < 8; ++g) put_word(to + 64 * g + 4 * c, word(s + 2 + 4 * g) ^ (kSignedBytes ? 0u : 0x80808080u));
    copy_half(to + 2 * kNibbles, c, s);
  }
};
template <bool five>
struct PackSuper {
  using Type = Super<std::conditional_t<five, FifthBit, NoBits>>;
  static constexpr int64_t file_bytes = five ? 176 : 144;
  static void block(const uint8_t* s, int64_t c, uint8_t* to) {
    const uint8_t* qh = s + 16;
    const uint8_t* qs = s + (five ? 48 : 16);
    copy_half(to, c, s);
    copy_half(to + kHalves, c, s + 2);
    for (int part = 0; part < 8; ++part) {
      uint8_t* q = to + 2 * kHalves + part * Type::part_bytes;
      put_half_bytes(q, c, qs + 32 * (part / 2), 4 * (part % 2));
      if constexpr (five) {
        uint32_t bits = 0;
        for (int i = 0; i < 32; ++i) bits |= uint32_t((qh[i] >> part) & 1) << i;
        put_fifth_bits(q + kNibbles, c, bits);
      }
      uint8_t* scales = q + Type::part_bytes - 2 * kBytes;
      six_bit_scales(s + 4, part, scales[c], scales[kBytes + c]);
    }
  }
};
struct PackQ6_K {
  using Type = Q6_K;
  static constexpr int64_t file_bytes = 210;
  static void block(const uint8_t* s, int64_t c, uint8_t* to) {
    const uint8_t *ql = s, *qh = s + 128, *scales = s + 192;
    copy_half(to, c, s + 208);
    for (int part = 0; part < 8; ++part) {  // 32 values: a quarter of each half of 128
      uint8_t* q = to + kHalves + part * Type::part_bytes;
      const int half = part / 4, quarter = part % 4;
      put_half_bytes(q, c, ql + 64 * half + 32 * (quarter % 2), 4 * (quarter / 2));
      for (int g = 0; g < 8; ++g) {  // 4 values: their 2 bits are field g % 4 of vector g / 4
        const uint32_t bits = (word(qh + 32 * half + 4 * g) >> (2 * quarter)) & 0x03030303;
        uint8_t* field = q + kNibbles + 64 * (g / 4) + 4 * c;
        put_word(field, word(field) | (bits << (2 * (g % 4))));
      }
      uint8_t* parts = q + kNibbles + TwoBits::bytes;
      parts[c] = scales[2 * part];
      parts[kBytes + c] = scales[2 * part + 1];
    }
  }
};

template <class Pack>
void pack_as(const uint8_t* src, size_t row_bytes, int64_t n, int64_t k, int64_t tile_begin, int64_t tile_end, uint8_t* dst) {
  using Type = typename Pack::Type;
  const int64_t num_blocks = k / kTypeK<Type>;
  const size_t tile_bytes = packed_tile_bytes<Type>(k);
  for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
    uint8_t* to = dst + size_t(tile) * tile_bytes;
    std::memset(to, 0, tile_bytes);
    const int64_t num_columns = n - tile * kTile < kTile ? n - tile * kTile : kTile;
    for (int64_t b = 0; b < num_blocks; ++b)
      for (int64_t c = 0; c < num_columns; ++c)
        Pack::block(src + size_t(tile * kTile + c) * row_bytes + b * Pack::file_bytes, c, to + b * kTypeBytes<Type>);
  }
}

}  // namespace
}  // namespace spolia::SPOLIA_LEVEL
