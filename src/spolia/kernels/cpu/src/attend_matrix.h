// Q K^T and P V by AMX: a register tile of 16 rows meets a block of bf16 K or V at once, as `attend_kv.h` stores them.
//
//     tile        0..3                4               5                 6                7
//     holds       sums                Q               P                 K                V
//     rows        16                  16              16                16 pairs         8 pairs of tokens
//     columns     16 tokens or        16 pairs of     8 pairs of        16 tokens        16 of head_dim
//                 16 of head_dim      depths          tokens
//
// A row's sum is a chain of tdpbf16ps in the order of depths or blocks; it does not depend on the other rows of its tile, so fewer
// than 16 are padded with whatever lies behind them, and what comes of that is not kept. tdpbf16ps takes denormals for 0.
#pragma once
#include <cstdint>
#include <cstring>

#include "attend_kv.h"

namespace spolia::SPOLIA_LEVEL {
namespace {

constexpr int64_t kMatrixRows = 16, kMatrixDepth = 32, kMatrixSums = 4;

using ScoreBlocks = void (*)(const float* q, int64_t ld_q, const uint16_t* const* blocks, int64_t num_next, int64_t depth,
                             size_t v_bytes_on, float* scores);
using WeighBlocks = void (*)(const float* p, const uint16_t* const* blocks, int64_t begin, int64_t end, int64_t column,
                             int64_t width, int64_t rows, float* out, int64_t ld_out);

#if defined(__AMX_BF16__)

constexpr bool kHasMatrix = true;

// The tiles' shapes, of this thread, as long as one of these lives.
class MatrixTiles {
 public:
  MatrixTiles() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 32, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 8};
    } shapes;
    _tile_loadconfig(&shapes);
  }
  ~MatrixTiles() { _tile_release(); }
  MatrixTiles(const MatrixTiles&) = delete;
  MatrixTiles& operator=(const MatrixTiles&) = delete;
};

// The intrinsics that load a tile do not tell the compiler that they read memory.
inline void finish_writes() { asm volatile("" ::: "memory"); }

// The intrinsics want a tile's number as it is written.
#define SPOLIA_EACH_SUM(count, act)      \
  { act(0); }                            \
  if constexpr ((count) > 1) { act(1); } \
  if constexpr ((count) > 2) { act(2); } \
  if constexpr ((count) > 3) { act(3); }

// Have a tile of K, or as much of V, brought nearer.
inline void ask(const uint16_t* elems) {
#pragma GCC unroll 16
  for (int line = 0; line < 16; ++line) __builtin_prefetch(elems + line * 32, 0, 2);
}

// scores[r][16 c + token] = q[r] . k of block c's token, for 16 rows. What is wanted next is asked for on the way, as in score_tile:
// these blocks' V, `v_bytes_on` behind their K (0: it is here already), and the K of the `num_next` blocks that follow them.
template <int Count>
void score_blocks(const float* q, int64_t ld_q, const uint16_t* const* blocks, int64_t num_next, int64_t depth, size_t v_bytes_on, float* scores) {
  finish_writes();
#define SPOLIA_ACT(c) _tile_zero(c)
  SPOLIA_EACH_SUM(Count, SPOLIA_ACT)
#undef SPOLIA_ACT
  for (int64_t d = 0; d < depth; d += kMatrixDepth) {
    _tile_loadd(4, q + d / 2, ld_q * 4);
#define SPOLIA_ACT(c)                                            \
  _tile_loadd(6, blocks[c] + d * kBlock, 64);                    \
  _tile_dpbf16ps(c, 4, 6);                                       \
  if (v_bytes_on) ask(blocks[c] + d * kBlock + v_bytes_on / 2);  \
  if (c < num_next) ask(blocks[Count + c] + d * kBlock);
    SPOLIA_EACH_SUM(Count, SPOLIA_ACT)
#undef SPOLIA_ACT
  }
#define SPOLIA_ACT(c) _tile_stored(c, scores + c * kBlock, kSplit * 4)
  SPOLIA_EACH_SUM(Count, SPOLIA_ACT)
#undef SPOLIA_ACT
}

// out[r] += p[r] x V over whole blocks [begin, end) of a split, for `rows` rows and 16 Count columns from `column` on.
template <int Count>
void weigh_blocks(const float* p, const uint16_t* const* blocks, int64_t begin, int64_t end, int64_t column, int64_t width,
                  int64_t rows, float* out, int64_t ld_out) {
  finish_writes();
#define SPOLIA_ACT(c) _tile_loadd(c, out + c * kBlock, ld_out * 4)
  SPOLIA_EACH_SUM(Count, SPOLIA_ACT)
#undef SPOLIA_ACT
  for (int64_t b = begin; b < end; ++b) {
    const uint16_t* v = blocks[b] + 2 * column;
    _tile_loadd(5, p + b * (kBlock / 2), kSplit * 4);
#define SPOLIA_ACT(c) _tile_loadd(7, v + c * 2 * kBlock, width * 4); _tile_dpbf16ps(c, 5, 7)
    SPOLIA_EACH_SUM(Count, SPOLIA_ACT)
#undef SPOLIA_ACT
  }
  alignas(64) float sums[kMatrixRows][Count * kBlock];
#define SPOLIA_ACT(c) _tile_stored(c, sums[0] + c * kBlock, sizeof sums[0])
  SPOLIA_EACH_SUM(Count, SPOLIA_ACT)
#undef SPOLIA_ACT
  for (int64_t r = 0; r < rows; ++r) std::memcpy(out + r * ld_out, sums[r], sizeof sums[r]);
}

#undef SPOLIA_EACH_SUM

constexpr ScoreBlocks kScoreBlocks[kMatrixSums] = {score_blocks<1>, score_blocks<2>, score_blocks<3>, score_blocks<4>};
constexpr WeighBlocks kWeighBlocks[kMatrixSums] = {weigh_blocks<1>, weigh_blocks<2>, weigh_blocks<3>, weigh_blocks<4>};

#else

constexpr bool kHasMatrix = false;
struct MatrixTiles {};
constexpr ScoreBlocks kScoreBlocks[kMatrixSums] = {};
constexpr WeighBlocks kWeighBlocks[kMatrixSums] = {};

#endif

// Whether K and V of this kind may be met by such tiles, and whether they are: in steps of depth that a tile has whole.
template <class K>
constexpr bool kMayTakeMatrix = kHasMatrix && sizeof(typename K::Elem) == 2 && K::kPack == 2;
template <class K>
inline bool takes_matrix(const AttendShape& shape) {
  return kMayTakeMatrix<K> && shape.head_dim % kMatrixDepth == 0;
}

}  // namespace
}  // namespace spolia::SPOLIA_LEVEL
