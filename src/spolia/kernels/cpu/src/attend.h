// Paged attention over KV blocks of 16 tokens.
//
// Block-major: a block of a group holds all its layers; layer l begins `layer_offset` bytes into each block. The layout
// inside (K transposed, 16 tokens = one vector: attend_kv.h) is attention's own business; nobody else reads KV.
//
// Exactness. The context is cut into splits at absolute multiples of kSplit (256) tokens. Each (row, head) computes each split
// from a fresh softmax state, by sums that are chains over head_dim and over tokens in order, and folds splits together in
// position order. So its result is a function of its q, its position and the KV it may see: the same bits whatever the number of
// rows, sequences and threads, and wherever a prefill was cut. Slots that a row may not see (stale, another row's future, behind
// the window) never enter its arithmetic, not even times 0: they may hold NaN.
//
// Numerics. float32 throughout, own exp2 and tanh to about 1e-7. With bf16 KV, AVX-512 BF16 and AMX round q and the softmax weights to bf16
// too (vdpbf16ps, tdpbf16ps), and divide by the sum of the rounded weights; that adds an error slightly below the one of rounding KV to bf16.
// Storing rounds to nearest, ties to even; what overflows f16 becomes its largest finite value. `scale` must be positive.
//
// INT8. K and V of a token and head are rotated (a Hadamard matrix over as much of head_dim as is a power of two) and kept as integers
// with one scale, a bf16. All that depends on this token alone. q meets rotated K as rotated q; a sum of rotated V is turned back when
// it is finished. The integers are read as bf16, which has them all, a split's at a time: what multiplies is that of bf16 KV. K's
// scales go to the scores, V's to the weights once those are summed.
// Source: Ashkboos et al. 2024, QuaRot (arXiv:2404.00456).
#pragma once
#include <cstddef>
#include <cstdint>

namespace spolia {

enum class KvType : int32_t { F32 = 0, F16 = 1, BF16 = 2, INT8 = 3 };
inline constexpr int64_t kBlock = 16;
inline constexpr int64_t kMostScaledDim = 1024;  // head_dim, for INT8

struct AttendShape {
  KvType kv_type;
  int64_t num_heads, num_kv_heads, head_dim;
  int64_t window;  // 0: full attention
  float scale;
  float softcap;   // 0: none
};

struct AttendStep {          // one layer of one step
  uint8_t* pool;             // the group's pool
  size_t block_bytes;        // bytes from a block to the next
  size_t layer_offset;       // this layer's first byte inside a block
  const int32_t* block_table;  // [num_seqs, max_blocks]
  int64_t max_blocks;
  const int32_t* row_starts; // [num_seqs + 1]
  const int32_t* positions;  // [num_rows]
  int64_t num_seqs;
  const float* q; int64_t ld_q;
  const float* k; int64_t ld_k;
  const float* v; int64_t ld_v;
  float* out; int64_t ld_out;  // [num_rows, num_heads * head_dim]
};

struct AttendKernels {
  size_t (*layer_bytes)(const AttendShape& shape);  // bytes of one layer in one block, a multiple of 64
  // Write rows [row_begin, row_end)'s k and v to their blocks. Rows of one sequence in one block may be written by different threads.
  void (*store)(const AttendShape& shape, const AttendStep& step, int64_t row_begin, int64_t row_end);
  // Cut the step into independent work items and write the plan to the head of shared_scratch; returns how many there are.
  // Called by one thread, after sizing shared_scratch and before the first item. The plan depends on shapes, positions and block
  // tables, never on KV, layer or threads: layers of one shape and group may run one after the other on one plan.
  int64_t (*plan)(const AttendShape& shape, const AttendStep& step, uint8_t* shared_scratch);
  // Bytes of scratch that all items of a step share (plan and partial results of splits), and bytes private to one thread;
  // both 64-byte aligned by the caller, neither initialised.
  size_t (*shared_scratch_bytes)(const AttendShape& shape, const AttendStep& step);
  size_t (*thread_scratch_bytes)(const AttendShape& shape);
  // Any thread may run any item, in any order; then, after a barrier, `merge` combines splits for rows [row_begin, row_end).
  void (*item)(const AttendShape& shape, const AttendStep& step, int64_t item, uint8_t* shared_scratch, uint8_t* thread_scratch);
  void (*merge)(const AttendShape& shape, const AttendStep& step, int64_t row_begin, int64_t row_end, uint8_t* shared_scratch);
  // Copy the first num_tokens tokens of one layer from block to block (copy-on-write); layer bytes given by the caller.
  void (*copy_tokens)(const AttendShape& shape, const uint8_t* src_layer, uint8_t* dst_layer, int64_t num_tokens);
};

}  // namespace spolia
