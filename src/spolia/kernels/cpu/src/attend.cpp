#include "attend.h"

#include <cstdint>
#include <cstring>

#include "attend_kv.h"
#include "attend_matrix.h"
#include "attend_plan.h"
#include "attend_vec.h"

namespace spolia::SPOLIA_LEVEL {
namespace {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kMasked = -1e30f;  // a score whose weight is exactly 0; finite, so that no NaN comes of it

int64_t sequence_of(const AttendStep& step, int64_t row) {
  int64_t s = 0;
  while (step.row_starts[s + 1] <= row) ++s;
  return s;
}

// ---- writing KV -----------------------------------------------------------------------------------------------------

// One head of Count neighbouring tokens to its place in a block, the first token at `slot`; Count is 1 or pack. Nothing but these
// tokens' elements is written: their neighbours' belong to other threads.
template <class K, int Count>
void store_head(const float* k, int64_t ld_k, const float* v, int64_t ld_v, int64_t head_dim, int64_t slot, int64_t width,
                typename K::Elem* k_out, typename K::Elem* v_out) {
  using Elem = typename K::Elem;
  constexpr int64_t pack = K::kPack, kChunk = 64;
  k_out += slot * pack, v_out += slot / pack * width * pack + slot % pack;
  for (int64_t begin = 0; begin < head_dim; begin += kChunk) {
    const int64_t n = head_dim - begin < kChunk ? head_dim - begin : kChunk;
    Elem k_row[Count][kChunk], v_row[Count][kChunk];
    for (int i = 0; i < Count; ++i) {
      for (int64_t d = 0; d < n; ++d) k_row[i][d] = K::encode(k[i * ld_k + begin + d]);
      for (int64_t d = 0; d < n; ++d) v_row[i][d] = K::encode(v[i * ld_v + begin + d]);
      if (n % pack) k_row[i][n] = Elem(0);
    }
    for (int64_t d = 0; d < n; d += pack)
      for (int i = 0; i < Count; ++i)
        std::memcpy(k_out + (begin + d) * kBlock + i * pack, &k_row[i][d], pack * sizeof(Elem));
    for (int64_t d = 0; d < n; ++d)
      for (int i = 0; i < Count; ++i) v_out[(begin + d) * pack + i] = v_row[i][d];
  }
}

// The same of one token, for K that is scaled.
template <class K>
void store_scaled_head(const float* k, const float* v, int64_t head_dim, int64_t slot, const Layout& layout, uint8_t* head) {
  constexpr int64_t pack = K::kPack;
  int8_t row[kMostScaledDim + pack];
  auto* k_out = reinterpret_cast<int8_t*>(head) + slot * pack;
  auto* v_out = reinterpret_cast<int8_t*>(head + layout.k_bytes) + slot / pack * layout.width * pack + slot % pack;
  auto* scales = reinterpret_cast<uint16_t*>(head + layout.k_bytes + layout.v_bytes) + slot;
  scales[0] = to_int8(k, head_dim, row);
  row[head_dim] = 0;
  for (int64_t d = 0; d < head_dim; d += pack) std::memcpy(k_out + d * kBlock, row + d, pack);
  scales[kBlock] = to_int8(v, head_dim, row);
  for (int64_t d = 0; d < head_dim; ++d) v_out[d * pack] = row[d];
}

template <class K>
void store_rows(const AttendShape& shape, const AttendStep& step, int64_t row_begin, int64_t row_end) {
  using Elem = typename K::Elem;
  const Layout layout = layout_of<K>(shape);
  int64_t seq = row_begin < row_end ? sequence_of(step, row_begin) : 0;
  for (int64_t row = row_begin, count; row < row_end; row += count) {
    while (step.row_starts[seq + 1] <= row) ++seq;
    const int64_t position = step.positions[row], slot = position % kBlock;
    const int64_t limit = step.row_starts[seq + 1] < row_end ? step.row_starts[seq + 1] : row_end;
    count = !kScaled<K> && slot % K::kPack == 0 && row + K::kPack <= limit ? K::kPack : 1;
    const int32_t block = step.block_table[seq * step.max_blocks + position / kBlock];
    uint8_t* head = step.pool + static_cast<size_t>(block) * step.block_bytes + step.layer_offset;
    for (int64_t h = 0; h < shape.num_kv_heads; ++h, head += layout.head_bytes) {
      const float* k = step.k + row * step.ld_k + h * shape.head_dim;
      const float* v = step.v + row * step.ld_v + h * shape.head_dim;
      if constexpr (kScaled<K>) {
        store_scaled_head<K>(k, v, shape.head_dim, slot, layout, head);
      } else {
        const auto store = count > 1 ? store_head<K, K::kPack> : store_head<K, 1>;
        store(k, step.ld_k, v, step.ld_v, shape.head_dim, slot, layout.width, reinterpret_cast<Elem*>(head),
              reinterpret_cast<Elem*>(head + layout.k_bytes));
      }
    }
  }
}

template <class K>
void copy_layer_tokens(const AttendShape& shape, const uint8_t* src, uint8_t* dst, int64_t num_tokens) {
  constexpr int64_t pack = K::kPack, elem = sizeof(typename K::Elem);
  const Layout layout = layout_of<K>(shape);
  const int64_t row_bytes = kBlock * pack * elem, pair_bytes = layout.width * pack * elem;
  for (int64_t h = 0; h < shape.num_kv_heads; ++h) {
    for (int64_t d = 0; d < layout.depth / pack; ++d)
      std::memcpy(dst + d * row_bytes, src + d * row_bytes, static_cast<size_t>(num_tokens * pack * elem));
    src += layout.k_bytes, dst += layout.k_bytes;
    std::memcpy(dst, src, static_cast<size_t>(num_tokens / pack * pair_bytes));
    for (int64_t t = num_tokens / pack * pack; t < num_tokens; ++t)
      for (int64_t d = 0; d < layout.width; ++d)
        std::memcpy(dst + t / pack * pair_bytes + d * pack * elem, src + t / pack * pair_bytes + d * pack * elem, elem);
    src += layout.v_bytes, dst += layout.v_bytes;
    if constexpr (kScaled<K>)
      for (int i = 0; i < 2; ++i, src += 2 * kBlock, dst += 2 * kBlock) std::memcpy(dst, src, static_cast<size_t>(2 * num_tokens));
  }
}

// ---- records: a split's result for one (row, head), [width] out, then maximum (times the scale, base 2) and sum --------

// `into` becomes the result of its tokens and, after them, of `next`'s.
void fold(float* into, const float* next, int64_t width) {
  const float maximum = into[width] > next[width] ? into[width] : next[width];
  const float a = exp2(into[width] - maximum), b = exp2(next[width] - maximum);
  for (int64_t d = 0; d < width; d += kLanes) store(into + d, fma(load(next + d), splat(b), load(into + d) * splat(a)));
  into[width] = maximum;
  into[width + 1] = first(fma(splat(next[width + 1]), splat(b), splat(into[width + 1] * a)));
}

template <class K>
void finish(float* record, int64_t width, int64_t head_dim, float* out) {
  if constexpr (kScaled<K>) rotate(record, head_dim);
  const Vec inverse = splat(1.0f / record[width + 1]);
  int64_t d = 0;
  for (; d + kLanes <= head_dim; d += kLanes) store(out + d, load(record + d) * inverse);
  for (; d < head_dim; ++d) out[d] = record[d] * inverse[0];
}

// ---- one item -------------------------------------------------------------------------------------------------------

// What one thread keeps of the tile it works on; `num_heads` counts (row, head) pairs, row-major.
struct TileScratch {
  static constexpr int64_t kPadding = kHasMatrix ? kMatrixRows - 1 : 0;  // rows of scores that pad the last rows to a tile of AMX
  static constexpr int64_t kSpare = kHasMatrix ? kBlock / 2 : 2;  // floats times width, for V of some tokens beside zeros
  float *q, *scores, *record, *state, *spare;
  float *k_scales, *v_scales;  // [kSplit], where K is scaled
  uint16_t* wide;              // K and V of a split's blocks as bf16, where K is scaled
  int64_t* bounds;  // [num_rows][2]: the row's tokens of the current split

  static int64_t max_heads(const AttendShape& shape) {
    const int64_t group = shape.num_heads / shape.num_kv_heads;
    return group > kTileHeads ? group : kTileHeads;
  }
  static int64_t floats(const AttendShape& shape) {
    const int64_t heads = max_heads(shape), width = round_up(shape.head_dim, kBlock);
    const int64_t plain = heads * (width + kSplit + 2 * record_floats(shape)) + kPadding * kSplit + kSpare * width;
    return shape.kv_type == KvType::INT8 ? plain + 2 * kSplit + kSplit * width : plain;
  }
  static size_t bytes(const AttendShape& shape) {
    return static_cast<size_t>(floats(shape)) * sizeof(float) + static_cast<size_t>(max_heads(shape)) * 2 * sizeof(int64_t);
  }
  TileScratch(const AttendShape& shape, uint8_t* scratch) {
    const int64_t heads = max_heads(shape), width = round_up(shape.head_dim, kBlock);
    q = reinterpret_cast<float*>(scratch);
    scores = q + heads * width;
    record = scores + (heads + kPadding) * kSplit;
    state = record + heads * record_floats(shape);
    spare = state + heads * record_floats(shape);
    k_scales = spare + kSpare * width;
    v_scales = k_scales + kSplit;
    wide = reinterpret_cast<uint16_t*>(v_scales + kSplit);
    bounds = reinterpret_cast<int64_t*>(reinterpret_cast<float*>(scratch) + floats(shape));
  }
};

template <class Stored>
class TileWorker {
  using K = typename Stored::Tile;  // as what it is read by the register tiles
  using Elem = typename K::Elem;
  static constexpr int64_t kPack = K::kPack, kParts = K::kParts;

 public:
  // `next`: the item that this thread is likely to do next, or null.
  TileWorker(const AttendShape& shape, const AttendStep& step, const Plan& plan, const Item& item, const Item* next, uint8_t* scratch)
      : shape_(shape), step_(step), plan_(plan), item_(item), next_(next), scratch_(shape, scratch), layout_(layout_of<K>(shape)),
        rows_(plan.tile_rows + item.tile_begin), group_(shape.num_heads / shape.num_kv_heads),
        ld_(record_floats(shape)), ld_q_(layout_.width),
        takes_matrix_(takes_matrix<K>(shape)), unit_(takes_matrix_ ? kBlock : kPack) {}

  void run() {
    if constexpr (kMayTakeMatrix<K>)
      if (takes_matrix_) {
        const MatrixTiles tiles;
        return run_splits();
      }
    run_splits();
  }

 private:
  void run_splits() {
    pack_q();
    for (int64_t split = item_.split_begin; split < item_.split_end; ++split) {
      if (!enter(split)) continue;
      foresee(split);
      score();
      for (int64_t r = row_begin_; r < row_end_; ++r)
        for (int64_t g = 0; g < group_; ++g) soften(r, r * group_ + g);
      weigh();
      leave(split);
    }
    if (item_.whole)
      for (int64_t r = 0; r < item_.num_rows; ++r)
        for (int64_t g = 0; g < group_; ++g)
          finish<Stored>(scratch_.state + (r * group_ + g) * ld_, layout_.width, shape_.head_dim,
                 step_.out + rows_[r] * step_.ld_out + head(g) * shape_.head_dim);
  }

  int64_t head(int64_t g) const { return item_.kv_head * group_ + g; }
  int64_t position(int64_t r) const { return step_.positions[rows_[r]]; }

  void pack_q() {
    // Rows of q and out lie far apart: ask for all of them at once, and for out as early as this.
    const int64_t floats = group_ * shape_.head_dim;
    for (int64_t r = 0; r < item_.num_rows; ++r)
      for (int64_t i = 0; i < floats; i += 16) {
        __builtin_prefetch(step_.q + rows_[r] * step_.ld_q + head(0) * shape_.head_dim + i);
        if (item_.whole) __builtin_prefetch(step_.out + rows_[r] * step_.ld_out + head(0) * shape_.head_dim + i, 1);
      }
    for (int64_t r = 0; r < item_.num_rows; ++r)
      for (int64_t g = 0; g < group_; ++g) {
        const float* q = step_.q + rows_[r] * step_.ld_q + head(g) * shape_.head_dim;
        if constexpr (kScaled<Stored>) {
          std::memcpy(scratch_.spare, q, static_cast<size_t>(shape_.head_dim) * sizeof(float));
          rotate(scratch_.spare, shape_.head_dim);
          q = scratch_.spare;
        }
        K::pack_row(q, shape_.head_dim, scratch_.q + (r * group_ + g) * ld_q_);
      }
  }

  // Find which rows have tokens in the split, and its blocks; false if none has.
  bool enter(int64_t split) {
    const int64_t base = split * kSplit;
    row_begin_ = row_end_ = 0;
    tokens_begin_ = kSplit, tokens_end_ = 0, common_begin_ = 0, common_end_ = kSplit;
    for (int64_t r = 0; r < item_.num_rows; ++r) {
      const int64_t first = first_token(shape_, position(r)) - base, end = position(r) + 1 - base;
      const int64_t lo = first > 0 ? first : 0, hi = end < kSplit ? end : kSplit;
      scratch_.bounds[2 * r] = lo, scratch_.bounds[2 * r + 1] = hi;
      if (lo >= hi) continue;
      if (row_end_ == 0) row_begin_ = r;
      row_end_ = r + 1;
      if (lo < tokens_begin_) tokens_begin_ = lo;
      if (hi > tokens_end_) tokens_end_ = hi;
      if (lo > common_begin_) common_begin_ = lo;
      if (hi < common_end_) common_end_ = hi;
    }
    if (row_end_ == 0) return false;
    common_begin_ = round_up(common_begin_, unit_), common_end_ = common_end_ / unit_ * unit_;
    if (common_begin_ > common_end_) common_end_ = common_begin_;
    // All rows of a tile read the same blocks.
    const int32_t* table = step_.block_table + plan_.seqs[rows_[row_begin_]] * step_.max_blocks + split * kSplitBlocks;
    const Layout stored = layout_of<Stored>(shape_);
    const size_t offset = step_.layer_offset + static_cast<size_t>(item_.kv_head) * stored.head_bytes;
    for (int64_t b = tokens_begin_ / kBlock; b * kBlock < tokens_end_; ++b) {
      const uint8_t* kv = step_.pool + static_cast<size_t>(table[b]) * step_.block_bytes + offset;
      if constexpr (kScaled<Stored>) kv = widen_block(kv, stored, b);
      k_blocks_[b] = reinterpret_cast<const Elem*>(kv);
      v_blocks_[b] = reinterpret_cast<const Elem*>(kv + layout_.k_bytes);
    }
    return true;
  }

  // Find the K of the split that this thread meets next, which is asked for beside V of this one; not where so many heads meet it
  // that memory keeps up by itself.
  void foresee(int64_t split) {
    std::memset(next_k_, 0, sizeof next_k_);
    const bool goes_on = split + 1 < item_.split_end;
    if ((!goes_on && !next_) || item_.num_rows * group_ > 2 * kTileRows) return;
    const Item& item = goes_on ? item_ : *next_;
    const int64_t base = (goes_on ? split + 1 : item.split_begin) * kSplit;
    const int32_t* rows = plan_.tile_rows + item.tile_begin;
    const int64_t first = first_token(shape_, step_.positions[rows[0]]) - base, end = step_.positions[rows[item.num_rows - 1]] + 1 - base;
    const int32_t* table = step_.block_table + plan_.seqs[rows[0]] * step_.max_blocks + base / kBlock;
    const size_t offset = step_.layer_offset + static_cast<size_t>(item.kv_head) * layout_of<Stored>(shape_).head_bytes;
    for (int64_t b = first > 0 ? first / kBlock : 0; b < kSplitBlocks && b * kBlock < end; ++b)
      next_k_[b] = step_.pool + static_cast<size_t>(table[b]) * step_.block_bytes + offset;
  }

  static void widen_bf16(const uint8_t* in, float* out) {  // of a block's tokens
    for (int64_t t = 0; t < kBlock; ++t) {
      uint16_t half;
      std::memcpy(&half, in + t * static_cast<int64_t>(sizeof half), sizeof half);
      const uint32_t bits = static_cast<uint32_t>(half) << 16;
      std::memcpy(out + t, &bits, sizeof bits);
    }
  }

  // The split's block b, which lies at `kv`, as bf16 without scales, and its scales.
  const uint8_t* widen_block(const uint8_t* kv, const Layout& stored, int64_t b) {
    const auto* integers = reinterpret_cast<const int8_t*>(kv);
    uint16_t* wide = scratch_.wide + b * kBlock * (layout_.depth + layout_.width);
    widen(integers, kBlock * layout_.depth, wide);
    widen(integers + stored.k_bytes, kBlock * layout_.width, wide + kBlock * layout_.depth);
    const uint8_t* scales = kv + stored.k_bytes + stored.v_bytes;
    widen_bf16(scales, scratch_.k_scales + b * kBlock);
    widen_bf16(scales + kBlock * sizeof(uint16_t), scratch_.v_scales + b * kBlock);
    return reinterpret_cast<const uint8_t*>(wide);
  }

  // scores[head][token] = q . k for every token that some row attends to; the other rows ignore them.
  void score() {
    if constexpr (kMayTakeMatrix<K>)
      if (takes_matrix_) return score_matrix();
    const int64_t num_steps = (shape_.head_dim + kPack - 1) / kPack;
    const int64_t m_begin = row_begin_ * group_, m_end = row_end_ * group_, most = tile_vecs(m_end - m_begin);
    const int64_t end = round_up(tokens_end_, kLanes) / kLanes;
    for (int64_t vec = tokens_begin_ / kLanes; vec < end; vec += most) {
      const int64_t vecs = end - vec < most ? end - vec : most;
      const Elem* columns[kWideVecs];
      for (int64_t c = 0; c < vecs; ++c) {
        const int64_t token = (vec + c) * kLanes;
        columns[c] = k_blocks_[token / kBlock] + token % kBlock * kPack;
      }
      for_row_chunks(m_begin, m_end, [&](int64_t m, int64_t rows) {
        kTiles<K>.score[rows - 1][vecs - 1](scratch_.q + m * ld_q_, ld_q_, columns, num_steps, layout_.k_bytes,
                                            scratch_.scores + m * kSplit + vec * kLanes);
      });
    }
  }

  void score_matrix() {
    const int64_t end = round_up(tokens_end_, kBlock) / kBlock;
    for (int64_t m = row_begin_ * group_; m < row_end_ * group_; m += kMatrixRows)
      for (int64_t b = tokens_begin_ / kBlock; b < end; b += kMatrixSums) {
        const int64_t count = end - b < kMatrixSums ? end - b : kMatrixSums;
        const bool is_first = m == row_begin_ * group_;  // the others find K and V in the cache
        const int64_t left = is_first ? end - b - count : 0;
        kScoreBlocks[count - 1](scratch_.q + m * ld_q_, ld_q_, k_blocks_ + b, left < kMatrixSums ? left : kMatrixSums,
                                layout_.depth, is_first ? layout_.k_bytes : 0,
                                scratch_.scores + m * kSplit + b * kBlock);
      }
  }

  // Scores of one (row, head) to weights p = 2^(score * scale * log2(e) - maximum), in place, as operands of P V.
  void soften(int64_t r, int64_t m) {
    const int64_t lo = scratch_.bounds[2 * r], hi = scratch_.bounds[2 * r + 1];
    float* record = scratch_.record + m * ld_;
    if (lo >= hi) return;
    for (int64_t d = 0; d < layout_.width; d += kLanes) store(record + d, splat(0.0f));
    float* scores = scratch_.scores + m * kSplit;
    const int64_t begin = lo / kUnit * kUnit, end = round_up(hi, kUnit);
    if constexpr (kScaled<Stored>)
      for (int64_t t = begin; t < end; t += kLanes) store(scores + t, load(scores + t) * load(scratch_.k_scales + t));
    if (shape_.softcap > 0.0f) {
      const Vec inner = splat(shape_.scale / shape_.softcap), cap = splat(shape_.softcap);
      for (int64_t t = begin; t < end; t += kLanes) store(scores + t, tanh(load(scores + t) * inner) * cap);
    }
    for (int64_t t = begin; t < lo; ++t) scores[t] = kMasked;
    for (int64_t t = hi; t < end; ++t) scores[t] = kMasked;
    const float factor = shape_.softcap > 0.0f ? kLog2E : shape_.scale * kLog2E;
    // A whole split is the usual case: with its bounds known, its loops have no branches.
    if (begin == 0 && end == kSplit) weigh_scores(scores, 0, kSplit, factor, record);
    else weigh_scores(scores, begin, end, factor, record);
    // A token that is masked has weight 0, but times a scale that may be NaN; one in a unit with one that is not will be read.
    if constexpr (kScaled<Stored>) {
      for (int64_t t = lo / unit_ * unit_; t < lo; ++t) clear_weight(scores, t);
      for (int64_t t = hi; t % unit_; ++t) clear_weight(scores, t);
    }
  }

  static void clear_weight(float* p, int64_t token) {
    if constexpr (kParts == 1) std::memset(reinterpret_cast<uint16_t*>(p) + token, 0, sizeof(uint16_t));
    else p[token] = 0.0f;
  }

  [[gnu::always_inline]] void weigh_scores(float* scores, int64_t begin, int64_t end, float factor, float* record) {
    Vec maxima = splat(kMasked);
#pragma GCC unroll 16
    for (int64_t t = begin; t < end; t += kLanes) maxima = max(maxima, load(scores + t));
    // The maximum is rounded once, here; weights of all splits refer to exactly this number.
    const float maximum = reduce_max(maxima) * factor;
    const auto weight = [&](int64_t t) {
      return exp2<K::kExpDegree>(fma(load(scores + t), splat(factor), splat(-maximum)));
    };
    Vec sums = splat(0.0f);
    if constexpr (kScaled<Stored>) {
      const auto scaled = [&](int64_t t) {
        const Vec w = weight(t);
        sums = sums + w;
        return w * load(scratch_.v_scales + t);
      };
      for (int64_t t = begin; t < end; t += kUnit) K::store_weights(scores, t, scaled, splat(0.0f));
    } else {
      for (int64_t t = begin; t < end; t += kUnit) sums = K::store_weights(scores, t, weight, sums);
    }
    record[layout_.width] = maximum;
    record[layout_.width + 1] = reduce_sum(sums);
  }

  // record[head] = P V over each row's own tokens, in order. Tokens common to all rows go together; those before and after, which a
  // part of the rows may not see, row by row: what another row may see never enters this row's sum, not even times 0.
  void weigh() {
    const auto each_row = [&](auto&& range) {
      for (int64_t r = row_begin_; r < row_end_; ++r) {
        const int64_t lo = scratch_.bounds[2 * r], hi = scratch_.bounds[2 * r + 1];
        if (lo < hi) range(r * group_, (r + 1) * group_, lo, hi);
      }
    };
    each_row([&](int64_t m, int64_t m_end, int64_t lo, int64_t hi) {
      weigh_tokens(m, m_end, lo, hi < common_begin_ ? hi : common_begin_);
    });
    weigh_tokens(row_begin_ * group_, row_end_ * group_, common_begin_, common_end_);
    each_row([&](int64_t m, int64_t m_end, int64_t lo, int64_t hi) {
      weigh_tokens(m, m_end, lo > common_end_ ? lo : common_end_, hi);
    });
  }

  void weigh_tokens(int64_t m, int64_t m_end, int64_t begin, int64_t end) {
    if (begin >= end) return;
    if constexpr (kMayTakeMatrix<K>)
      if (takes_matrix_) return weigh_matrix(m, m_end, begin, end);
    if constexpr (kPack == 2) {
      if (begin % 2) weigh_half_pair(m, m_end, begin++);
      if (end % 2 && begin < end) {
        weigh_steps(m, m_end, begin / 2, end / 2, v_blocks_);
        weigh_half_pair(m, m_end, end - 1);
        return;
      }
    }
    weigh_steps(m, m_end, begin / kPack, end / kPack, v_blocks_);
  }

  void weigh_matrix(int64_t m, int64_t m_end, int64_t begin, int64_t end) {
    if (begin % kBlock) {
      const int64_t block_end = round_up(begin, kBlock);
      weigh_part(m, m_end, begin, end < block_end ? end : block_end);
      if (block_end >= end) return;
      begin = block_end;
    }
    weigh_whole(m, m_end, begin / kBlock, end / kBlock, v_blocks_);
    if (end % kBlock) weigh_part(m, m_end, end / kBlock * kBlock, end);
  }

  // Tokens of one block of which others must not be read: their V beside zeros.
  void weigh_part(int64_t m, int64_t m_end, int64_t begin, int64_t end) {
    const int64_t b = begin / kBlock, elems = layout_.width * kPack;
    Elem* part = reinterpret_cast<Elem*>(scratch_.spare);
    for (int64_t t = b * kBlock; t < (b + 1) * kBlock; t += kPack, part += elems) {
      const Elem* v = v_blocks_[b] + t % kBlock / kPack * elems;
      const bool has_first = begin <= t && t < end, has_second = begin <= t + 1 && t + 1 < end;
      if (has_first && has_second) std::memcpy(part, v, static_cast<size_t>(elems) * sizeof(Elem));
      else if (has_first || has_second) clear_half(v, has_second, part);
      else std::memset(part, 0, static_cast<size_t>(elems) * sizeof(Elem));
    }
    const Elem* blocks[kSplitBlocks];
    blocks[b] = reinterpret_cast<const Elem*>(scratch_.spare);
    weigh_whole(m, m_end, b, b + 1, blocks);
  }

  void weigh_whole(int64_t m_begin, int64_t m_end, int64_t begin, int64_t end, const Elem* const* blocks) {
    if (begin >= end) return;
    for (int64_t m = m_begin; m < m_end; m += kMatrixRows)
      for (int64_t column = 0; column < layout_.width; column += kMatrixSums * kBlock) {
        const int64_t left = (layout_.width - column) / kBlock, count = left < kMatrixSums ? left : kMatrixSums;
        kWeighBlocks[count - 1](scratch_.scores + m * kSplit, blocks, begin, end, column, layout_.width,
                                m_end - m < kMatrixRows ? m_end - m : kMatrixRows, scratch_.record + m * ld_ + column, ld_);
      }
  }

  // One token whose pair partner must not be read: its V beside zeros.
  void weigh_half_pair(int64_t m, int64_t m_end, int64_t token) {
    const int64_t step = token % kBlock / kPack, elems = layout_.width * kPack;
    const Elem* v = v_blocks_[token / kBlock] + step * elems;
    Elem* pair = reinterpret_cast<Elem*>(scratch_.spare);
    clear_half(v, token % 2, pair);
    const Elem* blocks[kSplitBlocks];
    blocks[token / kBlock] = pair - step * elems;
    weigh_steps(m, m_end, token / kPack, token / kPack + 1, blocks);
  }

  // A pair of tokens of V with zeros in place of one of them.
  void clear_half(const Elem* v, bool is_first, Elem* out) const {
    for (int64_t i = 0; i < layout_.width * kPack; i += 2) {
      out[i] = is_first ? Elem(0) : v[i];
      out[i + 1] = is_first ? v[i + 1] : Elem(0);
    }
  }

  void weigh_steps(int64_t m_begin, int64_t m_end, int64_t begin, int64_t end, const Elem* const* blocks) {
    if (begin >= end) return;
    const int64_t num_vecs = layout_.width / kLanes, most = tile_vecs(m_end - m_begin);
    for (int64_t vec = 0; vec < num_vecs; vec += most) {
      const int64_t vecs = num_vecs - vec < most ? num_vecs - vec : most;
      for_row_chunks(m_begin, m_end, [&](int64_t m, int64_t rows) {
        kTiles<K>.weigh[rows - 1][vecs - 1](scratch_.scores + m * kSplit, blocks, vec * kLanes * kPack,
                                            layout_.width * kPack, begin, end, m == 0 ? next_k_ : kNone,
                                            scratch_.record + m * ld_ + vec * kLanes, ld_);
      });
    }
  }

  // The split's records go to the rows' running state, or to shared scratch.
  void leave(int64_t split) {
    for (int64_t r = row_begin_; r < row_end_; ++r) {
      if (scratch_.bounds[2 * r] >= scratch_.bounds[2 * r + 1]) continue;
      const int64_t nth = split - first_split(shape_, position(r));
      for (int64_t g = 0; g < group_; ++g) {
        const float* record = scratch_.record + (r * group_ + g) * ld_;
        float* state = scratch_.state + (r * group_ + g) * ld_;
        if (!item_.whole) state = plan_.records + ((plan_.partials[rows_[r]] + nth) * shape_.num_heads + head(g)) * ld_;
        if (item_.whole && nth > 0) fold(state, record, layout_.width);
        else for (int64_t d = 0; d < ld_; d += kLanes) store(state + d, load(record + d));
      }
    }
  }

  // Cut [begin, end) into chunks of nearly one size that a register tile can take.
  template <class Visit>
  static void for_row_chunks(int64_t begin, int64_t end, const Visit& visit) {
    for (int64_t chunks = (end - begin + kTileRows - 1) / kTileRows; chunks > 0; --chunks) {
      const int64_t rows = (end - begin + chunks - 1) / chunks;
      visit(begin, rows);
      begin += rows;
    }
  }

  static constexpr const uint8_t* kNone[kSplitBlocks] = {};

  const AttendShape& shape_;
  const AttendStep& step_;
  const Plan& plan_;
  const Item& item_;
  const Item* const next_;
  const TileScratch scratch_;
  const Layout layout_;
  const int32_t* rows_;
  const int64_t group_, ld_, ld_q_;
  const bool takes_matrix_;
  const int64_t unit_;                 // tokens of V that are met by one multiplication, all or none of them
  int64_t row_begin_, row_end_;        // rows of the tile that have tokens in this split
  int64_t tokens_begin_, tokens_end_;  // tokens that some row attends to
  int64_t common_begin_, common_end_;  // tokens that all of them attend to, whole units
  const Elem* k_blocks_[kSplitBlocks];
  const Elem* v_blocks_[kSplitBlocks];
  const uint8_t* next_k_[kSplitBlocks];  // of the split that comes next; null: none
};

// ---- the table ------------------------------------------------------------------------------------------------------

#define SPOLIA_BY_TYPE(type, call)                               \
  switch (type) {                                                \
    case KvType::F32: { using K = Kv<KvType::F32>; call; break; } \
    case KvType::F16: { using K = Kv<KvType::F16>; call; break; } \
    case KvType::BF16: { using K = Kv<KvType::BF16>; call; break; } \
    case KvType::INT8: { using K = Kv<KvType::INT8>; call; break; } \
  }

size_t layer_bytes(const AttendShape& shape) {
  size_t bytes = 0;
  SPOLIA_BY_TYPE(shape.kv_type, bytes = layout_of<K>(shape).layer_bytes)
  return bytes;
}

void store(const AttendShape& shape, const AttendStep& step, int64_t row_begin, int64_t row_end) {
  SPOLIA_BY_TYPE(shape.kv_type, store_rows<K>(shape, step, row_begin, row_end))
}

int64_t plan(const AttendShape& shape, const AttendStep& step, uint8_t* shared_scratch) {
  return Planner(shape, step).write(shared_scratch);
}

size_t shared_scratch_bytes(const AttendShape& shape, const AttendStep& step) { return Planner(shape, step).bytes(); }

size_t thread_scratch_bytes(const AttendShape& shape) { return TileScratch::bytes(shape); }

void item(const AttendShape& shape, const AttendStep& step, int64_t item, uint8_t* shared_scratch, uint8_t* thread_scratch) {
  const Plan plan = plan_view(shared_scratch);
  const Item* next = item + 1 < plan.header->num_items ? plan.items + item + 1 : nullptr;
  SPOLIA_BY_TYPE(shape.kv_type, TileWorker<K>(shape, step, plan, plan.items[item], next, thread_scratch).run())
}

void merge(const AttendShape& shape, const AttendStep& step, int64_t row_begin, int64_t row_end, uint8_t* shared_scratch) {
  const Plan plan = plan_view(shared_scratch);
  const int64_t width = round_up(shape.head_dim, kBlock), ld = record_floats(shape);
  for (int64_t row = row_begin; row < row_end; ++row) {
    if (plan.partials[row] < 0) continue;
    const int64_t position = step.positions[row], count = end_split(position) - first_split(shape, position);
    for (int64_t h = 0; h < shape.num_heads; ++h) {
      float* state = plan.records + (plan.partials[row] * shape.num_heads + h) * ld;
      for (int64_t nth = 1; nth < count; ++nth) fold(state, state + nth * shape.num_heads * ld, width);
      SPOLIA_BY_TYPE(shape.kv_type, finish<K>(state, width, shape.head_dim, step.out + row * step.ld_out + h * shape.head_dim))
    }
  }
}

void copy_tokens(const AttendShape& shape, const uint8_t* src_layer, uint8_t* dst_layer, int64_t num_tokens) {
  SPOLIA_BY_TYPE(shape.kv_type, copy_layer_tokens<K>(shape, src_layer, dst_layer, num_tokens))
}

}  // namespace

AttendKernels attend_kernels() {
  return {layer_bytes, store, plan, shared_scratch_bytes, thread_scratch_bytes, item, merge, copy_tokens};
}

}  // namespace spolia::SPOLIA_LEVEL
