// Matrix products: see linear.h. Compiled once per level; `linear_vec.h` has the instructions.
//
// A packed tile is 16 output columns, block by block of 32 k (or k by k for float types), nothing re-rounded:
//
//   nibbles  4 vectors of 64 bytes: byte 4c + t of vector j holds k = 4j + t (low) and k = 16 + 4j + t (high) of column c,
//            which is a transpose of the file's own 16 bytes
//   Q5       + 8 masks of 64 bits: bit 4c + t of mask g is the fifth bit of k = 4g + t
//   Q8_0     8 vectors of whole bytes: vector g holds k = 4g + t
//   Q6_K     + 2 vectors of 2-bit fields: field f of vector h belongs to nibbles g = 4h + f
//   scales   behind the values, 16 float16 (or 16 bytes) a kind; of K-quants, d and dmin open each run of eight blocks
//
// A prepared row has a `Row8`, one cache line, per 32 k (or a `Row16`, two). A tile and some rows meet in
//
//   acc  = zero-point term + sum of 32 products           exact in int32, so its order is free
//   out += float(acc) * (d_weight * d_row) (+ min * (d_row * sum of the row's 32))     in order of k, whatever the number of rows
//
// so a row's result is the same alone and in any batch.
#include "linear.h"

#include <type_traits>

#include "linear_vec.h"

namespace spolia::SPOLIA_LEVEL {
namespace {

constexpr int64_t kBlockK = 32, kSuperK = 256, kTile = 16;
constexpr int kChains = 2;  // sums that a float product runs in, by k modulo 2: a constant of the result

// 32 values of a row: q, and what a product needs of them besides.
struct RowTail {
  float d;            // scale
  float d_sum;        // scale * sum of q
  int32_t minus_8, minus_16, minus_128;  // -zero_point * sum of q
  int32_t minus_32[2];                   // -32 * sum of q, of each half
  int32_t unused;
};
struct alignas(64) Row8 : RowTail {
  int8_t q[32];

  using Sum = Acc;
  SPOLIA_INLINE Sum start_at(int32_t x) { return start(x); }
  SPOLIA_INLINE Sum dot_at(const Sum& sum, const W& w, const Row8* x, int k) { return dot(sum, w, x->q + k); }
  SPOLIA_INLINE Sum dot_bytes_at(const Sum& sum, const W& w, const Row8* x, int k) { return dot_bytes(sum, w, x->q + k); }
  SPOLIA_INLINE F value(const Sum& sum) { return to_float(sum); }
};
// 16 bits: kBase * high + low, each in [-127, 127].
struct alignas(64) Row16 : RowTail {
  int8_t high[32], low[32];

  struct Sum { Acc high, low; };
  SPOLIA_INLINE Sum start_at(int32_t x) { return {start(0), start(x)}; }
  SPOLIA_INLINE Sum dot_at(const Sum& sum, const W& w, const Row16* x, int k) {
    return {dot(sum.high, w, x->high + k), dot(sum.low, w, x->low + k)};
  }
  SPOLIA_INLINE Sum dot_bytes_at(const Sum& sum, const W& w, const Row16* x, int k) {
    return {dot_bytes(sum.high, w, x->high + k), dot_bytes(sum.low, w, x->low + k)};
  }
  SPOLIA_INLINE F value(const Sum& sum) { return fma(to_float(sum.high), splat(kBase), to_float(sum.low)); }

  static constexpr int kBase = 254;
};
static_assert(sizeof(Row8) == 64 && sizeof(Row16) == 128);

// ---- Integer weights -------------------------------------------------------------------------------------------------

constexpr int64_t kNibbles = 256, kHalves = 32, kBytes = 16;  // of 16 columns: 32 nibbles, one float16, one byte each

struct NoBits {
  static constexpr int64_t bytes = 0;
  template <int g> SPOLIA_INLINE W apply(W w, const uint8_t*) { return w; }
};
struct FifthBit {
  static constexpr int64_t bytes = 64;
  template <int g> SPOLIA_INLINE W apply(W w, const uint8_t* bits) { return add_fifth_bit(w, bits + 8 * g); }
};
struct TwoBits {
  static constexpr int64_t bytes = 128;
  template <int g> SPOLIA_INLINE W apply(W w, const uint8_t* bits) { return add_two_bits<g % 4>(w, load_bytes(bits + 64 * (g / 4))); }
};

// Vector j of the nibbles holds weights j (low) and j + 4 (high); the further bits lie behind the nibbles.
template <class Bits, int j, class Row, int R>
SPOLIA_INLINE void dot_nibbles(const uint8_t* p, const Row* const (&x)[R], typename Row::Sum (&low)[R], typename Row::Sum (&high)[R]) {
  const W both = load_bytes(p + 64 * j);
  const W a = Bits::template apply<j>(low_nibbles(both), p + kNibbles);
  const W b = Bits::template apply<j + 4>(high_nibbles(both), p + kNibbles);
  for (int r = 0; r < R; ++r) low[r] = Row::dot_at(low[r], a, x[r], 4 * j);
  for (int r = 0; r < R; ++r) high[r] = Row::dot_at(high[r], b, x[r], 4 * j + 16);
}

template <class Bits, class Row, int R>
SPOLIA_INLINE void dot_block(const uint8_t* p, const Row* const (&x)[R], typename Row::Sum (&low)[R], typename Row::Sum (&high)[R]) {
  dot_nibbles<Bits, 0>(p, x, low, high);
  dot_nibbles<Bits, 1>(p, x, low, high);
  dot_nibbles<Bits, 2>(p, x, low, high);
  dot_nibbles<Bits, 3>(p, x, low, high);
}

// One scale for 32 k, and perhaps a minimum: Q4_0, Q4_1, Q5_0, Q5_1.
template <class Bits, int32_t RowTail::* zero_point, bool has_min>
struct Simple {
  static constexpr int64_t block_k = kBlockK;
  static constexpr int64_t block_bytes = kNibbles + Bits::bytes + (has_min ? 2 : 1) * kHalves;

  template <class Row, int R>
  SPOLIA_INLINE void add_block(const uint8_t* p, const Row* const (&x)[R], F (&out)[R]) {
    typename Row::Sum acc[R];
    for (int r = 0; r < R; ++r) acc[r] = Row::start_at(has_min ? 0 : x[r]->*zero_point);
    dot_block<Bits>(p, x, acc, acc);
    const uint8_t* scales = p + kNibbles + Bits::bytes;
    const F d = load_half(scales);
    for (int r = 0; r < R; ++r) out[r] = fma(Row::value(acc[r]), mul(d, splat(x[r]->d)), out[r]);
    if constexpr (has_min) {
      const F m = load_half(scales + kHalves);
      for (int r = 0; r < R; ++r) out[r] = fma(m, splat(x[r]->d_sum), out[r]);
    }
  }
};

struct Bytes {  // Q8_0
  static constexpr int64_t block_k = kBlockK;
  static constexpr int64_t block_bytes = 2 * kNibbles + kHalves;

  template <class Row, int R>
  SPOLIA_INLINE void add_block(const uint8_t* p, const Row* const (&x)[R], F (&out)[R]) {
    typename Row::Sum acc[R];
    for (int r = 0; r < R; ++r) acc[r] = Row::start_at(kSignedBytes ? 0 : x[r]->minus_128);
    for (int g = 0; g < 8; ++g) {
      const W w = load_bytes(p + 64 * g);
      for (int r = 0; r < R; ++r) acc[r] = Row::dot_bytes_at(acc[r], w, x[r], 4 * g);
    }
    const F d = load_half(p + 2 * kNibbles);
    for (int r = 0; r < R; ++r) out[r] = fma(Row::value(acc[r]), mul(d, splat(x[r]->d)), out[r]);
  }
};

// Eight blocks of 32 k with 6-bit scales and minima under one d and one dmin: Q4_K, Q5_K.
template <class Bits>
struct Super {
  static constexpr int64_t block_k = kSuperK;
  static constexpr int64_t part_bytes = kNibbles + Bits::bytes + 2 * kBytes;
  static constexpr int64_t block_bytes = 2 * kHalves + 8 * part_bytes;

  template <class Row, int R>
  SPOLIA_INLINE void add_block(const uint8_t* p, const Row* const (&first)[R], F (&out)[R]) {
    const F d = load_half(p), minus_dmin = mul(load_half(p + kHalves), splat(-1.0f));
    for (int part = 0; part < 8; ++part) {
      const uint8_t* q = p + 2 * kHalves + part * part_bytes;
      const Row* x[R];
      typename Row::Sum acc[R];
      for (int r = 0; r < R; ++r) x[r] = first[r] + part;
      for (int r = 0; r < R; ++r) acc[r] = Row::start_at(0);
      dot_block<Bits>(q, (const Row* const (&)[R])x, acc, acc);
      const F scale = mul(d, load_u8(q + kNibbles + Bits::bytes));
      const F min = mul(minus_dmin, load_u8(q + kNibbles + Bits::bytes + kBytes));
      for (int r = 0; r < R; ++r) out[r] = fma(Row::value(acc[r]), mul(scale, splat(x[r]->d)), out[r]);
      for (int r = 0; r < R; ++r) out[r] = fma(min, splat(x[r]->d_sum), out[r]);
    }
  }
};

// Sixteen scales of 16 k under one d: Q6_K. The low nibbles are the first 16 k of 32, the high ones the others.
struct Sixteens {
  static constexpr int64_t block_k = kSuperK;
  static constexpr int64_t part_bytes = kNibbles + TwoBits::bytes + 2 * kBytes;
  static constexpr int64_t block_bytes = kHalves + 8 * part_bytes;

  template <class Row, int R>
  SPOLIA_INLINE void add_block(const uint8_t* p, const Row* const (&first)[R], F (&out)[R]) {
    const F d = load_half(p);
    for (int part = 0; part < 8; ++part) {
      const uint8_t* q = p + kHalves + part * part_bytes;
      const Row* x[R];
      typename Row::Sum low[R], high[R];
      for (int r = 0; r < R; ++r) x[r] = first[r] + part;
      for (int r = 0; r < R; ++r) low[r] = Row::start_at(x[r]->minus_32[0]);
      for (int r = 0; r < R; ++r) high[r] = Row::start_at(x[r]->minus_32[1]);
      dot_block<TwoBits>(q, (const Row* const (&)[R])x, low, high);
      const F scale_low = mul(d, load_i8(q + kNibbles + TwoBits::bytes));
      const F scale_high = mul(d, load_i8(q + kNibbles + TwoBits::bytes + kBytes));
      for (int r = 0; r < R; ++r) out[r] = fma(Row::value(low[r]), mul(scale_low, splat(x[r]->d)), out[r]);
      for (int r = 0; r < R; ++r) out[r] = fma(Row::value(high[r]), mul(scale_high, splat(x[r]->d)), out[r]);
    }
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

template <class Type, class Row = Row8>
struct Quantised {
  static constexpr int max_rows = kMaxRows > 1 && std::is_same_v<Row, Row16> ? kMaxRows / 2 : kMaxRows;  // registers

  static size_t tile_bytes(int64_t k) { return size_t(k / Type::block_k * Type::block_bytes); }

  template <int R>
  static void tile(const uint8_t* w, int64_t k, const uint8_t* rows, size_t row_bytes, F (&out)[R]) {
    const Row* x[R];
    for (int r = 0; r < R; ++r) {
      x[r] = reinterpret_cast<const Row*>(rows + size_t(r) * row_bytes);
      out[r] = zero();
    }
    for (int64_t b = 0; b < k / Type::block_k; ++b, w += Type::block_bytes) {
      Type::add_block(w, (const Row* const (&)[R])x, out);
      for (int r = 0; r < R; ++r) x[r] += Type::block_k / kBlockK;
    }
  }
};

// ---- Float weights ---------------------------------------------------------------------------------------------------

// Products run in kChains sums by turns of k, added at the end: shorter chains of dependent additions, in an order that is fixed.
template <class Type>
struct Floats {
  static constexpr int max_rows = kMaxRows;

  static size_t tile_bytes(int64_t k) { return size_t((k + Type::step_k * kChains - 1) / (Type::step_k * kChains) * kChains * Type::step_bytes); }

  template <int R>
  static void tile(const uint8_t* w, int64_t k, const uint8_t* rows, size_t row_bytes, F (&out)[R]) {
    F sums[kChains][R];
    for (int c = 0; c < kChains; ++c)
      for (int r = 0; r < R; ++r) sums[c][r] = zero();
    const int64_t num_steps = int64_t(tile_bytes(k)) / Type::step_bytes;
    for (int64_t s = 0; s < num_steps; s += kChains)
      for (int c = 0; c < kChains; ++c, w += Type::step_bytes)
        Type::add_step(w, rows + (s + c) * Type::row_step_bytes, row_bytes, sums[c]);
    for (int r = 0; r < R; ++r) out[r] = add(sums[0][r], sums[1][r]);
  }
};

struct Float32 {
  static constexpr int64_t step_k = 1, step_bytes = 64, row_step_bytes = 4;
  template <int R>
  SPOLIA_INLINE void add_step(const uint8_t* w, const uint8_t* rows, size_t row_bytes, F (&out)[R]) {
    const F v = load(reinterpret_cast<const float*>(w));
    for (int r = 0; r < R; ++r) out[r] = fma(v, splat(*reinterpret_cast<const float*>(rows + size_t(r) * row_bytes)), out[r]);
  }
};
struct Float16 {
  static constexpr int64_t step_k = 1, step_bytes = 32, row_step_bytes = 4;
  template <int R>
  SPOLIA_INLINE void add_step(const uint8_t* w, const uint8_t* rows, size_t row_bytes, F (&out)[R]) {
    const F v = load_half(w);
    for (int r = 0; r < R; ++r) out[r] = fma(v, splat(*reinterpret_cast<const float*>(rows + size_t(r) * row_bytes)), out[r]);
  }
};
struct Brain16 {  // pairs of k
  static constexpr int64_t step_k = 2, step_bytes = 64, row_step_bytes = 4;
  template <int R>
  SPOLIA_INLINE void add_step(const uint8_t* w, const uint8_t* rows, size_t row_bytes, F (&out)[R]) {
    for (int r = 0; r < R; ++r) out[r] = dot_bf16(out[r], w, rows + size_t(r) * row_bytes);
  }
};

// ---- A matrix: rows in groups, tile by tile --------------------------------------------------------------------------

int64_t row_bytes_of(RowKind kind, int64_t k) {
  if (kind == RowKind::Q8) return k / kBlockK * int64_t(sizeof(Row8));
  if (kind == RowKind::Q16) return k / kBlockK * int64_t(sizeof(Row16));
  const int64_t bytes = kind == RowKind::BF16 ? 2 * k : 4 * k;
  return (bytes + 63) / 64 * 64;  // the padding, zeros, meets the padding of the weights
}

SPOLIA_INLINE void finish(F sum, int64_t row, int64_t column, int64_t n, float* out, int64_t ld_out, const Epilogue& e) {
  alignas(64) float part[kTile] = {};
  float* to = out + row * ld_out + column;
  const float* residual = e.residual ? e.residual + row * e.ld_residual + column : nullptr;
  if (column + kTile <= n) {
    if (e.bias) sum = add(sum, load(e.bias + column));
    if (residual) sum = add(sum, load(residual));
    store(to, sum);
    return;
  }
  store(part, sum);
  for (int64_t c = 0; c < n - column; ++c) {
    float x = part[c];
    if (e.bias) x += e.bias[column + c];
    if (residual) x += residual[c];
    to[c] = x;
  }
}

template <class Product, int R>
void rows_of_tile(const uint8_t* w, int64_t tile, const Packed& p, const uint8_t* rows, size_t row_bytes, int64_t first, float* out, int64_t ld_out, const Epilogue& e) {
  F sums[R];
  Product::template tile<R>(w, p.k, rows + size_t(first) * row_bytes, row_bytes, sums);
  for (int r = 0; r < R; ++r) finish(sums[r], first + r, tile * kTile, p.n, out, ld_out, e);
}

template <class Product, int R>
SPOLIA_INLINE void rest_of_tile(int64_t count, const uint8_t* w, int64_t tile, const Packed& p, const uint8_t* rows, size_t row_bytes, int64_t first, float* out, int64_t ld_out, const Epilogue& e) {
  if constexpr (R > 0) {
    if (count == R) rows_of_tile<Product, R>(w, tile, p, rows, row_bytes, first, out, ld_out, e);
    else rest_of_tile<Product, R - 1>(count, w, tile, p, rows, row_bytes, first, out, ld_out, e);
  }
}

template <class Product>
void run_as(const Packed& p, RowKind kind, const uint8_t* rows, int64_t num_rows, float* out, int64_t ld_out, const Epilogue& e, int64_t tile_begin, int64_t tile_end) {
  const size_t tile_bytes = Product::tile_bytes(p.k), row_bytes = size_t(row_bytes_of(kind, p.k));
  for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
    const uint8_t* w = p.data + size_t(tile) * tile_bytes;
    int64_t first = 0;
    constexpr int R = Product::max_rows;
    for (; first + R <= num_rows; first += R) rows_of_tile<Product, R>(w, tile, p, rows, row_bytes, first, out, ld_out, e);
    rest_of_tile<Product, R - 1>(num_rows - first, w, tile, p, rows, row_bytes, first, out, ld_out, e);
  }
}

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
  const int64_t num_blocks = k / Type::block_k;
  const size_t tile_bytes = Quantised<Type>::tile_bytes(k);
  for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
    uint8_t* to = dst + size_t(tile) * tile_bytes;
    std::memset(to, 0, tile_bytes);
    const int64_t num_columns = n - tile * kTile < kTile ? n - tile * kTile : kTile;
    for (int64_t b = 0; b < num_blocks; ++b)
      for (int64_t c = 0; c < num_columns; ++c)
        Pack::block(src + size_t(tile * kTile + c) * row_bytes + b * Pack::file_bytes, c, to + b * Type::block_bytes);
  }
}

// Column c of step s at byte s * step_bytes + c * size: `size` bytes hold step_k values.
template <class Type>
void pack_floats(const uint8_t* src, size_t row_bytes, int64_t n, int64_t k, int64_t tile_begin, int64_t tile_end, uint8_t* dst) {
  constexpr int64_t size = Type::step_bytes / kTile;
  const size_t tile_bytes = Floats<Type>::tile_bytes(k);
  const int64_t num_bytes = k * size / Type::step_k;  // of a file row; the last pair may be half
  for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
    uint8_t* to = dst + size_t(tile) * tile_bytes;
    std::memset(to, 0, tile_bytes);
    for (int64_t c = 0; c < kTile && tile * kTile + c < n; ++c) {
      const uint8_t* from = src + size_t(tile * kTile + c) * row_bytes;
      for (int64_t at = 0; at < num_bytes; at += size)
        std::memcpy(to + at / size * Type::step_bytes + c * size, from + at, size_t(num_bytes - at < size ? num_bytes - at : size));
    }
  }
}

// ---- Rows ------------------------------------------------------------------------------------------------------------

SPOLIA_INLINE uint16_t to_bf16(float x) {  // to nearest, ties to even; NaN stays NaN
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t((bits >> 16) | 0x40);
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

void fill_tail(RowTail& tail, float d, const int32_t (&sums)[2]) {
  const int32_t sum = sums[0] + sums[1];
  tail.d = d;
  tail.d_sum = d * float(sum);
  tail.minus_8 = -8 * sum;
  tail.minus_16 = -16 * sum;
  tail.minus_128 = -128 * sum;
  tail.minus_32[0] = -32 * sums[0];
  tail.minus_32[1] = -32 * sums[1];
  tail.unused = 0;
}

void quantise(const float* x, Row8& row) {
  int32_t sums[2] = {};
  const float largest = quantise_32(x, row.q, sums);
  fill_tail(row, largest / 127.0f, sums);
}

void quantise(const float* x, Row16& row) {
  constexpr int kSteps = Row16::kBase * 127 + 127;
  float largest = 0, poison = 0;
  for (int i = 0; i < 32; ++i) {
    const float magnitude = std::fabs(x[i]);
    largest = magnitude > largest ? magnitude : largest;
    poison += x[i] * 0.0f;
  }
  int32_t sums[2] = {};
  for (int i = 0; i < 32 && poison == 0.0f; ++i) {
    const int q = largest > 0 ? int(std::lrint(double(x[i]) / largest * kSteps)) : 0;
    constexpr int kRound = Row16::kBase / 2 - 1;  // so that neither part leaves [-127, 127]
    const int high = (q + (q < 0 ? -kRound : kRound)) / Row16::kBase;
    row.high[i] = int8_t(high);
    row.low[i] = int8_t(q - Row16::kBase * high);
    sums[i / 16] += q;
  }
  fill_tail(row, largest / float(kSteps) + poison, sums);
}

template <class Row>
void quantise_row(const float* x, int64_t k, uint8_t* dst) {
  Row* blocks = reinterpret_cast<Row*>(dst);
  for (int64_t i = 0; i < k; i += kBlockK) quantise(x + i, blocks[i / kBlockK]);
}

void prepare_row(RowKind kind, const float* x, int64_t k, uint8_t* dst) {
  if (kind == RowKind::Q8) return quantise_row<Row8>(x, k, dst);
  if (kind == RowKind::Q16) return quantise_row<Row16>(x, k, dst);
  const int64_t num_bytes = row_bytes_of(kind, k);
  if (kind == RowKind::F32) {
    std::memcpy(dst, x, size_t(k) * 4);
    std::memset(dst + k * 4, 0, size_t(num_bytes - k * 4));
    return;
  }
  uint16_t* to = reinterpret_cast<uint16_t*>(dst);
  for (int64_t i = 0; i < k; ++i) to[i] = to_bf16(x[i]);
  std::memset(to + k, 0, size_t(num_bytes - k * 2));
}

// ---- The embedding's rows, exactly -----------------------------------------------------------------------------------

SPOLIA_INLINE float half_at(const uint8_t* p) {
#if defined(__F16C__)
  uint16_t h;
  std::memcpy(&h, p, 2);
  return _cvtsh_ss(h);
#elif defined(SPOLIA_LEVEL_generic)
  uint16_t h;
  std::memcpy(&h, p, 2);
  return half_to_float(h);
#endif
}

void dequantize_row(WeightType type, const uint8_t* s, int64_t k, float scale, float* out) {
  switch (type) {
    case WeightType::F32:
      for (int64_t i = 0; i < k; ++i) {
        float x;
        std::memcpy(&x, s + 4 * i, 4);
        out[i] = x * scale;
      }
      return;
    case WeightType::F16:
      for (int64_t i = 0; i < k; ++i) out[i] = half_at(s + 2 * i) * scale;
      return;
    case WeightType::BF16:
      for (int64_t i = 0; i < k; ++i) {
        uint16_t h;
        std::memcpy(&h, s + 2 * i, 2);
        const uint32_t bits = uint32_t(h) << 16;
        float x;
        std::memcpy(&x, &bits, 4);
        out[i] = x * scale;
      }
      return;
    case WeightType::Q4_0: case WeightType::Q4_1: case WeightType::Q5_0: case WeightType::Q5_1: {
      const bool five = type == WeightType::Q5_0 || type == WeightType::Q5_1;
      const bool has_min = type == WeightType::Q4_1 || type == WeightType::Q5_1;
      const int64_t head = (has_min ? 4 : 2), bytes = head + (five ? 4 : 0) + 16;
      for (int64_t b = 0; b < k / kBlockK; ++b, s += bytes, out += kBlockK) {
        const float d = half_at(s), m = has_min ? half_at(s + 2) : 0.0f;
        const uint32_t bits = five ? word(s + head) : 0;
        const uint8_t* qs = s + bytes - 16;
        for (int i = 0; i < 32; ++i) {
          const int q = ((qs[i % 16] >> (i / 16 * 4)) & 15) | int((bits >> i) & 1) << 4;
          out[i] = (has_min ? d * float(q) + m : d * float(q - (five ? 16 : 8))) * scale;
        }
      }
      return;
    }
    case WeightType::Q8_0:
      for (int64_t b = 0; b < k / kBlockK; ++b, s += 34, out += kBlockK) {
        const float d = half_at(s);
        for (int i = 0; i < 32; ++i) out[i] = d * float(int8_t(s[2 + i])) * scale;
      }
      return;
    case WeightType::Q4_K: case WeightType::Q5_K: {
      const bool five = type == WeightType::Q5_K;
      for (int64_t b = 0; b < k / kSuperK; ++b, s += five ? 176 : 144, out += kSuperK) {
        const float d = half_at(s), dmin = half_at(s + 2);
        const uint8_t *qh = s + 16, *qs = s + (five ? 48 : 16);
        for (int part = 0; part < 8; ++part) {
          uint8_t sc, mn;
          six_bit_scales(s + 4, part, sc, mn);
          const float scale_of_part = d * float(sc), min = dmin * float(mn);
          for (int i = 0; i < 32; ++i) {
            int q = (qs[32 * (part / 2) + i] >> (4 * (part % 2))) & 15;
            if (five) q |= ((qh[i] >> part) & 1) << 4;
            out[32 * part + i] = (scale_of_part * float(q) - min) * scale;
          }
        }
      }
      return;
    }
    case WeightType::Q6_K:
      for (int64_t b = 0; b < k / kSuperK; ++b, s += 210, out += kSuperK) {
        const float d = half_at(s + 208);
        for (int i = 0; i < 256; ++i) {
          const int half = i / 128, quarter = i % 128 / 32, at = i % 32;
          const int low = (s[64 * half + 32 * (quarter % 2) + at] >> (4 * (quarter / 2))) & 15;
          const int high = (s[128 + 32 * half + at] >> (2 * quarter)) & 3;
          out[i] = d * float(int8_t(s[192 + i / 16])) * float((low | high << 4) - 32) * scale;
        }
      }
      return;
  }
}

// ---- By type ---------------------------------------------------------------------------------------------------------

RowKind row_kind(WeightType type) {
  switch (type) {
    case WeightType::F32: case WeightType::F16: return RowKind::F32;
    case WeightType::BF16: return RowKind::BF16;
    default: return RowKind::Q8;
  }
}

size_t row_bytes(RowKind kind, int64_t k) { return size_t(row_bytes_of(kind, k)); }

// What is done with each type, in one place: F is called with the type's product and packing functions.
#define SPOLIA_BY_TYPE(type, CALL_QUANTISED, CALL_FLOATS)                              \
  switch (type) {                                                                      \
    case WeightType::F32: CALL_FLOATS(Float32); break;                                 \
    case WeightType::F16: CALL_FLOATS(Float16); break;                                 \
    case WeightType::BF16: CALL_FLOATS(Brain16); break;                                \
    case WeightType::Q4_0: CALL_QUANTISED(PackQ4_0); break;                            \
    case WeightType::Q4_1: CALL_QUANTISED(PackQ4_1); break;                            \
    case WeightType::Q5_0: CALL_QUANTISED(PackQ5_0); break;                            \
    case WeightType::Q5_1: CALL_QUANTISED(PackQ5_1); break;                            \
    case WeightType::Q8_0: CALL_QUANTISED(PackQ8_0); break;                            \
    case WeightType::Q4_K: CALL_QUANTISED(PackSuper<false>); break;                    \
    case WeightType::Q5_K: CALL_QUANTISED(PackSuper<true>); break;                     \
    case WeightType::Q6_K: CALL_QUANTISED(PackQ6_K); break;                            \
  }

size_t packed_bytes(WeightType type, int64_t n, int64_t k) {
  const size_t num_tiles = size_t((n + kTile - 1) / kTile);
#define QUANTISED(Pack) return k % Pack::Type::block_k ? 0 : num_tiles * Quantised<Pack::Type>::tile_bytes(k)
#define FLOATS(Type) return num_tiles * Floats<Type>::tile_bytes(k)
  SPOLIA_BY_TYPE(type, QUANTISED, FLOATS)
#undef QUANTISED
#undef FLOATS
  return 0;
}

void pack(WeightType type, const uint8_t* src, size_t bytes, int64_t n, int64_t k, int64_t tile_begin, int64_t tile_end, uint8_t* dst) {
#define QUANTISED(Pack) pack_as<Pack>(src, bytes, n, k, tile_begin, tile_end, dst)
#define FLOATS(Type) pack_floats<Type>(src, bytes, n, k, tile_begin, tile_end, dst)
  SPOLIA_BY_TYPE(type, QUANTISED, FLOATS)
#undef QUANTISED
#undef FLOATS
}

void run(const Packed& w, RowKind kind, const uint8_t* rows, int64_t num_rows, float* out, int64_t ld_out, const Epilogue& e, int64_t tile_begin, int64_t tile_end) {
#define QUANTISED(Pack)                                                                                                              \
  kind == RowKind::Q16 ? run_as<Quantised<Pack::Type, Row16>>(w, kind, rows, num_rows, out, ld_out, e, tile_begin, tile_end) \
                       : run_as<Quantised<Pack::Type>>(w, kind, rows, num_rows, out, ld_out, e, tile_begin, tile_end)
#define FLOATS(Type) run_as<Floats<Type>>(w, kind, rows, num_rows, out, ld_out, e, tile_begin, tile_end)
  SPOLIA_BY_TYPE(w.type, QUANTISED, FLOATS)
#undef QUANTISED
#undef FLOATS
}

}  // namespace

LinearKernels linear_kernels() { return {row_kind, packed_bytes, pack, row_bytes, prepare_row, run, dequantize_row}; }

}  // namespace spolia::SPOLIA_LEVEL
