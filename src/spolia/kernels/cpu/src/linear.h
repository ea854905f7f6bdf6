// Matrix products of activations with packed weights: out[r, n] = sum_k x[r, k] * W[n, k] (+ bias[n]) (+ residual[r, n]).
//
// A weight matrix is packed once at load: 16 output columns ("a tile") interleaved, values and scales unchanged.
// Activations are prepared once per row and kind (int8 per 32 with their scale and sum; bf16; f32) and then used by every
// matrix that reads that row. A row's result depends on that row alone: fixed order over k, whatever the number of rows.
#pragma once
#include <cstddef>
#include <cstdint>

namespace spolia {

enum class WeightType : int32_t { F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14, BF16 = 30 };

// How a row is prepared for a weight type.
//   Q8   for integer weights: int8 with one scale per 32 values
//   Q16  the same in 16 bits, for the last product of a model: rounding that nothing downstream averages out
enum class RowKind : int32_t { F32 = 0, BF16 = 1, Q8 = 2, Q16 = 3 };

struct Packed {       // a view; the executable owns the bytes
  WeightType type;
  int64_t n, k;       // output columns, input columns
  const uint8_t* data;  // packed_bytes(type, n, k), 64-byte aligned
};

struct Epilogue {
  const float* bias;      // [n] or null
  const float* residual;  // [num_rows, ld_residual] or null; may alias out exactly
  int64_t ld_residual;
};

struct LinearKernels {
  RowKind (*row_kind)(WeightType type);  // the usual one; integer weights take Q16 rows too
  size_t (*packed_bytes)(WeightType type, int64_t n, int64_t k);
  // Pack tiles [tile_begin, tile_end) (16 columns each; the last one padded) of file rows `src` (row_bytes apart) into `dst`.
  void (*pack)(WeightType type, const uint8_t* src, size_t row_bytes, int64_t n, int64_t k, int64_t tile_begin, int64_t tile_end, uint8_t* dst);
  size_t (*row_bytes)(RowKind kind, int64_t k);  // bytes of one prepared row, a multiple of 64
  void (*prepare_row)(RowKind kind, const float* x, int64_t k, uint8_t* dst);
  // Columns of tiles [tile_begin, tile_end) for rows [0, num_rows) of `rows` (prepared, row_bytes apart).
  void (*run)(const Packed& w, RowKind kind, const uint8_t* rows, int64_t num_rows, float* out, int64_t ld_out, const Epilogue& epilogue, int64_t tile_begin, int64_t tile_end);
  // One row of the original file layout to float32 (embedding look-up).
  void (*dequantize_row)(WeightType type, const uint8_t* src, int64_t k, float scale, float* out);
  // What a core can do at most: `turns` rounds of int8 dot products, or of multiply-adds, on a few lines that stay in its
  // nearest cache. Returns how many additions and multiplications that were; `sink`, 16 floats, keeps them from being skipped.
  int64_t (*int8_peak)(int64_t turns, float* sink);
  int64_t (*float_peak)(int64_t turns, float* sink);
};

}  // namespace spolia
