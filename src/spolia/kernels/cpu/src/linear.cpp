// Matrix products: see linear.h. Compiled once per level; `linear_types.h` has the layouts, `linear_vec.h` the instructions.
//
// A prepared row has a `Row8`, one cache line, per 32 k (or a `Row16`, two). A tile and some rows meet in
//
//   acc  = zero-point term + sum of 32 products           exact in int32, so its order is free
//   out += float(acc) * (d_weight * d_row) (+ min * (d_row * sum of the row's 32))     in order of k, whatever the number of rows
//
// so a row's result is the same alone and in any batch.
#include "linear.h"

#include "linear_types.h"

namespace spolia::SPOLIA_LEVEL {
namespace {

// ---- Integer weights -------------------------------------------------------------------------------------------------

// The value of row r's sums, plane after plane; exact but for one rounding of a 16-bit row's.
template <int planes, int N>
SPOLIA_INLINE F value_of(const Acc (&acc)[N], int r) {
  constexpr int R = N / planes;
  if constexpr (planes == 1) return to_float(acc[r]);
  else return fma(to_float(acc[r]), splat(kRowBase), to_float(acc[R + r]));
}

// out += the products of one part of each of T tiles, `tile_bytes` apart, with one block of each row.
template <class Type, int planes, int T, int R>
SPOLIA_INLINE void add_part(const uint8_t* p, size_t tile_bytes, const typename Type::Head (&heads)[T], const Row<planes>* const (&x)[R],
                            F (&out)[T][R]) {
  unrolled<0, Type::num_scales>([&]<int s>() SPOLIA_LAMBDA {
    constexpr int count = 8 / Type::num_scales;
    Acc acc[T][planes * R];  // to the products, a 16-bit row is two rows
    for (int t = 0; t < T; ++t)
      for (int i = 0; i < planes * R; ++i) acc[t][i] = start(i / R == planes - 1 ? Type::template zero_point<s>(*x[i % R]) : 0);
    dots<Type::bits, count>(acc, [&](int i) SPOLIA_LAMBDA { return x[i % R]->q[i / R] + 4 * count * s; },
                            [&]<int g>(int t) SPOLIA_LAMBDA { return Type::template weights<count * s + g>(p + size_t(t) * tile_bytes); });
    for (int t = 0; t < T; ++t) {
      const F scale = Type::template scale<s>(p + size_t(t) * tile_bytes, heads[t]);
      for (int r = 0; r < R; ++r) out[t][r] = fma(value_of<planes>(acc[t], r), mul(scale, splat(x[r]->d)), out[t][r]);
    }
  });
  if constexpr (Type::has_min)
    for (int t = 0; t < T; ++t) {
      const F min = Type::min(p + size_t(t) * tile_bytes, heads[t]);
      for (int r = 0; r < R; ++r) out[t][r] = fma(min, splat(x[r]->d_sum), out[t][r]);
    }
}

// Weights come from memory once, in order, and the hardware looks ahead less far than a part takes with several rows.
template <int64_t num_bytes>
SPOLIA_INLINE void prefetch(const uint8_t* p) {
  for (int64_t i = 0; i < num_bytes; i += 64) __builtin_prefetch(p + i);
}

// out += the products of `num_blocks` blocks of T tiles with R rows, in order of k.
template <class Type, int planes, bool from_memory, int T, int R>
SPOLIA_INLINE void add_blocks(const uint8_t* w, size_t tile_bytes, int64_t num_blocks, const uint8_t* rows, size_t row_bytes, F (&out)[T][R]) {
  const Row<planes>* x[R];
  for (int r = 0; r < R; ++r) x[r] = reinterpret_cast<const Row<planes>*>(rows + size_t(r) * row_bytes);
  for (int64_t b = 0; b < num_blocks; ++b) {
    typename Type::Head heads[T];
    for (int t = 0; t < T; ++t) heads[t] = Type::head(w + size_t(t) * tile_bytes);
    w += Type::head_bytes;
    for (int part = 0; part < Type::num_parts; ++part, w += Type::part_bytes) {
      if constexpr (from_memory)  // the same part of the next tiles
        for (int t = T; t < 2 * T; ++t) prefetch<Type::part_bytes>(w + size_t(t) * tile_bytes);
      add_part<Type, planes, T, R>(w, tile_bytes, heads, x, out);
      for (int r = 0; r < R; ++r) ++x[r];
    }
  }
}

// ---- Float weights ---------------------------------------------------------------------------------------------------

constexpr int kChains = 2;  // sums that a float product runs in, by k modulo 2: a constant of the result
constexpr int64_t kFloatsAhead = 4608;  // bytes

// The sums are added at the end: shorter chains of dependent additions, in an order that is fixed.
template <class Type>
struct Floats {
  static constexpr int max_rows = Type::step_k == 1 ? kMaxFloatRows : kMaxRows;
  static size_t bytes_of_tile(int64_t k) { return size_t((k + Type::step_k * kChains - 1) / (Type::step_k * kChains) * kChains * Type::step_bytes); }

  template <int R>
  SPOLIA_INLINE void tile(const uint8_t* w, int64_t k, const uint8_t* rows, size_t row_bytes, F (&out)[R]) {
    F sums[kChains][R];
    for (int c = 0; c < kChains; ++c)
      for (int r = 0; r < R; ++r) sums[c][r] = zero();
    const int64_t num_turns = int64_t(bytes_of_tile(k)) / (Type::step_bytes * kChains);
    for (int64_t i = 0; i < num_turns; ++i) {
      prefetch<kChains * Type::step_bytes>(w + kFloatsAhead);
      unrolled<0, kChains>([&]<int c>() SPOLIA_LAMBDA { Type::add_step(w + c * Type::step_bytes, rows + c * Type::row_step_bytes, row_bytes, sums[c]); });
      w += kChains * Type::step_bytes;
      rows += kChains * Type::row_step_bytes;
    }
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

struct Rows {  // prepared, and where their products go
  const uint8_t* data;
  size_t row_bytes;
  int64_t num_rows;
  float* out;
  int64_t ld_out;
  Epilogue epilogue;
};

template <int most, class Body>
SPOLIA_INLINE void with_constant(int64_t value, Body body) {  // body<value>(), for a value in [1, most]
  if (most == 1 || value == most) body.template operator()<most>();
  else if constexpr (most > 1) with_constant<most - 1>(value, body);
}

// body<R>(first) for rows [first, first + R): few groups of at most `most` rows, as even as can be.
template <int most, class Body>
SPOLIA_INLINE void in_groups(int64_t num_rows, Body body) {
  int64_t first = 0;
  for (int64_t num_groups = (num_rows + most - 1) / most; num_groups > 0; --num_groups) {
    const int64_t size = (num_rows - first + num_groups - 1) / num_groups;
    with_constant<most>(size, [&]<int R>() SPOLIA_LAMBDA { body.template operator()<R>(first); });
    first += size;
  }
}

// Tiles [tile_begin, tile_end), T at a time: body<T>(tile).
template <class Body>
SPOLIA_INLINE void in_tiles(int64_t tile_begin, int64_t tile_end, int64_t most, Body body) {
  int64_t tile = tile_begin;
  if (most >= kTiles)
    for (; tile + kTiles <= tile_end; tile += kTiles) body.template operator()<kTiles>(tile);
  for (; tile < tile_end; ++tile) body.template operator()<1>(tile);
}

template <int T, int R>
SPOLIA_INLINE void finish_group(const F (&sums)[T][R], int64_t tile, const Packed& p, const Rows& x, int64_t first) {
  for (int t = 0; t < T; ++t)
    for (int r = 0; r < R; ++r) finish(sums[t][r], first + r, (tile + t) * kTile, p.n, x.out, x.ld_out, x.epilogue);
}

template <class Product>
void run_floats(const Packed& p, const Rows& x, int64_t tile_begin, int64_t tile_end) {
  const size_t tile_bytes = Product::bytes_of_tile(p.k);
  for (int64_t tile = tile_begin; tile < tile_end; ++tile)
    in_groups<Product::max_rows>(x.num_rows, [&]<int R>(int64_t first) SPOLIA_LAMBDA {
      F sums[1][R];
      Product::template tile<R>(p.data + size_t(tile) * tile_bytes, p.k, x.data + size_t(first) * x.row_bytes, x.row_bytes, sums[0]);
      finish_group(sums, tile, p, x, first);
    });
}

template <class Type, int planes, int T, int R>
void group_in_registers(const uint8_t* w, int64_t tile, const Packed& p, const Rows& x, int64_t first) {
  F sums[T][R];
  for (int t = 0; t < T; ++t)
    for (int r = 0; r < R; ++r) sums[t][r] = zero();
  add_blocks<Type, planes, true>(w, packed_tile_bytes<Type>(p.k), p.k / kTypeK<Type>, x.data + size_t(first) * x.row_bytes, x.row_bytes, sums);
  finish_group(sums, tile, p, x, first);
}

template <class Type, int planes>
void run_in_registers(const Packed& p, const Rows& x, int64_t tile_begin, int64_t tile_end) {
  const size_t tile_bytes = packed_tile_bytes<Type>(p.k);
  // Few rows wait for memory, which is quicker to read in one run than in two side by side.
  in_tiles(tile_begin, tile_end, x.num_rows <= kMaxRows ? 1 : kTiles, [&]<int T>(int64_t tile) SPOLIA_LAMBDA {
    const uint8_t* w = p.data + size_t(tile) * tile_bytes;
    in_groups<kMaxRows / planes>(x.num_rows, [&]<int R>(int64_t first) SPOLIA_LAMBDA { group_in_registers<Type, planes, T, R>(w, tile, p, x, first); });
  });
}

// Many rows: 256 k of the tiles are unpacked once for all of them, and the rows' sums wait in memory meanwhile.
constexpr int64_t kPanelParts = 8, kPanelRows = 256;

template <class Type>
using Panel = typename Unpacked<Type>::Part[kPanelParts];

template <class Type, int planes, int T, int R>
void group_of_panel(const Panel<Type>* panels, int64_t num_parts, const uint8_t* rows, size_t row_bytes, float (*sums)[T][kTile]) {
  F out[T][R];
  for (int t = 0; t < T; ++t)
    for (int r = 0; r < R; ++r) out[t][r] = load(sums[r][t]);
  add_blocks<Unpacked<Type>, planes, false>(reinterpret_cast<const uint8_t*>(panels), sizeof(Panel<Type>), num_parts, rows, row_bytes, out);
  for (int t = 0; t < T; ++t)
    for (int r = 0; r < R; ++r) store(sums[r][t], out[t][r]);
}

template <class Type>
void unpack_panel(const uint8_t* w, int64_t num_parts, typename Unpacked<Type>::Part* panel) {
  const int64_t panel_bytes = num_parts / Type::num_parts * kTypeBytes<Type>;
  for (int64_t i = 0; i < num_parts;) {
    const typename Type::Head head = Type::head(w);
    w += Type::head_bytes;
    for (int part = 0; part < Type::num_parts; ++part, ++i, w += Type::part_bytes) {
      prefetch<Type::part_bytes>(w + panel_bytes);
      Unpacked<Type>::unpack(w, head, panel[i]);
    }
  }
}

template <class Type, int planes>
void run_in_panels(const Packed& p, const Rows& x, int64_t tile_begin, int64_t tile_end) {
  const size_t tile_bytes = packed_tile_bytes<Type>(p.k);
  for (int64_t begin = 0; begin < x.num_rows; begin += kPanelRows) {
    const int64_t num_rows = x.num_rows - begin < kPanelRows ? x.num_rows - begin : kPanelRows;
    in_tiles(tile_begin, tile_end, kTiles, [&]<int T>(int64_t tile) SPOLIA_LAMBDA {
      alignas(64) Panel<Type> panels[T];
      alignas(64) float sums[kPanelRows][T][kTile];
      const uint8_t* w = p.data + size_t(tile) * tile_bytes;
      std::memset(sums, 0, size_t(num_rows) * sizeof(sums[0]));
      for (int64_t k = 0; k < p.k; k += kPanelParts * kBlockK) {
        const int64_t num_parts = p.k - k < kPanelParts * kBlockK ? (p.k - k) / kBlockK : kPanelParts;
        for (int t = 0; t < T; ++t) unpack_panel<Type>(w + size_t(t) * tile_bytes, num_parts, panels[t]);
        w += num_parts / Type::num_parts * kTypeBytes<Type>;
        const uint8_t* rows = x.data + size_t(begin) * x.row_bytes + k / kBlockK * int64_t(sizeof(Row<planes>));
        in_groups<kMaxRows / planes>(num_rows, [&]<int R>(int64_t first) SPOLIA_LAMBDA {
          group_of_panel<Type, planes, T, R>(panels, num_parts, rows + size_t(first) * x.row_bytes, x.row_bytes, sums + first);
        });
      }
      for (int64_t r = 0; r < num_rows; ++r)
        for (int t = 0; t < T; ++t) finish(load(sums[r][t]), begin + r, (tile + t) * kTile, p.n, x.out, x.ld_out, x.epilogue);
    });
  }
}

template <class Type, int planes>
void run_quantised(const Packed& p, const Rows& x, int64_t tile_begin, int64_t tile_end) {
  if constexpr (kManyRows == 1) run_in_panels<Type, planes>(p, x, tile_begin, tile_end);
  else if (planes == 1 && unpacking_pays(Type::bits) && x.num_rows >= kManyRows) run_in_panels<Type, 1>(p, x, tile_begin, tile_end);
  else run_in_registers<Type, planes>(p, x, tile_begin, tile_end);
}

// ---- Packing of floats -----------------------------------------------------------------------------------------------

// Column c of step s at byte s * step_bytes + c * size: `size` bytes hold step_k values.
template <class Type>
void pack_floats(const uint8_t* src, size_t row_bytes, int64_t n, int64_t k, int64_t tile_begin, int64_t tile_end, uint8_t* dst) {
  constexpr int64_t size = Type::step_bytes / kTile;
  const size_t tile_bytes = Floats<Type>::bytes_of_tile(k);
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
  const float largest = quantise_32(x, row.q[0], sums);
  fill_tail(row, largest / 127.0f, sums);
}

void quantise(const float* x, Row16& row) {
  constexpr int kSteps = kRowBase * 127 + 127;
  float largest = 0, poison = 0;
  for (int i = 0; i < 32; ++i) {
    const float magnitude = std::fabs(x[i]);
    largest = magnitude > largest ? magnitude : largest;
    poison += x[i] * 0.0f;
  }
  int32_t sums[2] = {};
  for (int i = 0; i < 32 && poison == 0.0f; ++i) {
    const int q = largest > 0 ? int(std::lrint(double(x[i]) / largest * kSteps)) : 0;
    constexpr int kRound = kRowBase / 2 - 1;  // so that neither part leaves [-127, 127]
    const int high = (q + (q < 0 ? -kRound : kRound)) / kRowBase;
    row.q[0][i] = int8_t(high);
    row.q[1][i] = int8_t(q - kRowBase * high);
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
#else
  uint16_t h;
  std::memcpy(&h, p, 2);
  return half_to_float(Words4{h, 0, 0, 0})[0];
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

// ---- The core's own limits -------------------------------------------------------------------------------------------

int64_t int8_peak(int64_t turns, float* sink) {
  alignas(64) uint8_t weights[8 * 64] = {};
  Row8 rows[kMaxRows] = {};
  Acc acc[kTiles][kMaxRows];
  for (int t = 0; t < kTiles; ++t)
    for (int r = 0; r < kMaxRows; ++r) acc[t][r] = start(kMaxRows * t + r);  // no two sums are one to the compiler
  for (int64_t i = 0; i < turns; ++i)
    dots<4, 8>(acc, [&](int r) SPOLIA_LAMBDA { return rows[r % kMaxRows].q[0]; },
               [&]<int g>(int) SPOLIA_LAMBDA { return load_bytes(weights + 64 * g); });
  F sum = zero();
  for (int t = 0; t < kTiles; ++t)
    for (int r = 0; r < kMaxRows; ++r) sum = add(sum, to_float(acc[t][r]));
  store(sink, sum);
  return turns * 2 * kBlockK * kTile * kTiles * kMaxRows;
}

int64_t float_peak(int64_t turns, float* sink) {
  constexpr int kSums = 2 * kMaxRows;
  F sums[kSums];
  for (int i = 0; i < kSums; ++i) sums[i] = splat(float(i));
  const F a = load(sink), b = splat(sink[0]);
  for (int64_t i = 0; i < turns; ++i)
    for (int j = 0; j < kSums; ++j) sums[j] = fma(sums[j], a, b);
  for (int i = 1; i < kSums; ++i) sums[0] = add(sums[0], sums[i]);
  store(sink, sums[0]);
  return turns * 2 * kTile * kSums;
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
#define QUANTISED(Pack) return k % kTypeK<Pack::Type> ? 0 : num_tiles * packed_tile_bytes<Pack::Type>(k)
#define FLOATS(Type) return num_tiles * Floats<Type>::bytes_of_tile(k)
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
  const Rows x{rows, row_bytes(kind, w.k), num_rows, out, ld_out, e};
#define QUANTISED(Pack) \
  kind == RowKind::Q16 ? run_quantised<Pack::Type, 2>(w, x, tile_begin, tile_end) : run_quantised<Pack::Type, 1>(w, x, tile_begin, tile_end)
#define FLOATS(Type) run_floats<Floats<Type>>(w, x, tile_begin, tile_end)
  SPOLIA_BY_TYPE(w.type, QUANTISED, FLOATS)
#undef QUANTISED
#undef FLOATS
}

}  // namespace

LinearKernels linear_kernels() { return {row_kind, packed_bytes, pack, row_bytes, prepare_row, run, dequantize_row, int8_peak, float_peak}; }

}  // namespace spolia::SPOLIA_LEVEL
