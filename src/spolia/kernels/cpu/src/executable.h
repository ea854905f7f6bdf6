// A plan with its weights packed and its buffers allocated: runs steps.
#pragma once
#include <atomic>
#include <memory>
#include <vector>

#include "isa.h"
#include "memory.h"
#include "plan.h"
#include "threads.h"

namespace spolia {

struct Pool {  // of one cache group
  uint8_t* data;
  int64_t num_blocks;
};

struct BlockCopy {
  int group;
  int64_t src, dst, num_tokens;
};

struct BlockTable {  // of one cache group: [num_seqs, max_blocks]
  const int32_t* data;
  int64_t max_blocks;
};

// Arrays belong to the caller. `check` has passed on it.
struct Step {
  int64_t num_rows, num_seqs, num_logit_rows;
  const int32_t* token_ids;
  const int32_t* positions;
  const int32_t* row_starts;
  const int32_t* logit_rows;
  std::vector<BlockTable> block_tables;
  std::vector<BlockCopy> copies;
  float* logits;  // [num_logit_rows, vocab_size]; null: the head is not computed
  float* hidden;  // [num_logit_rows, hidden_size], what the head reads; null: nobody wants it
  float* layers;  // [num_layers, num_logit_rows, hidden_size], what each layer reads; null: nobody wants it
};

struct Range {
  int64_t begin, end;
};

class Executable {
 public:
  // Packs the weights, on all threads. The tables' bytes must outlive the executable, the matrices' need not.
  Executable(Plan plan, const Kernels& kernels, int64_t vocab_size, int num_threads);

  const Kernels& kernels() const { return kernels_; }
  int64_t vocab_size() const { return vocab_size_; }
  int64_t hidden_size() const { return plan_.hidden_size; }
  int64_t num_layers() const { return plan_.num_layers; }
  int num_threads() const { return threads_->size(); }
  int num_groups() const { return int(plan_.groups.size()); }
  size_t block_bytes(int group) const { return block_bytes_[group]; }
  size_t packed_bytes() const { return packed_memory_.size(); }

  void set_num_threads(int num_threads) { threads_ = std::make_unique<Threads>(num_threads); }
  // How KV is kept from now on: blocks have another size, and no pools are bound.
  void set_kv_type(KvType kv_type);
  void bind_kv(std::vector<Pool> pools) { pools_ = std::move(pools); }

  // Throws std::invalid_argument, naming the value and its limit, if the step is not one that `run` can compute.
  void check(const Step& step) const;
  void run(const Step& step);

  // The head alone: logits [num_rows, vocab_size] of rows [num_rows, hidden_size].
  void head(const float* hidden, int64_t num_rows, float* logits);

  // best[row]: where the largest of `width` values of each of `num_rows` rows is; see RowwiseKernels.
  void argmax(const float* rows, int64_t num_rows, int64_t width, int64_t* best);

  // Seconds spent in each stage's row part and heavy part since the last call, two a stage, on thread 0 with its waiting;
  // measured only while `profiling`.
  std::vector<double> take_profile();
  bool profiling = false;

 private:
  struct View {  // a buffer in this step
    uint8_t* base;
    size_t row_stride;
    size_t thread_stride;
  };
  using Part = Threads::Part;

  float* floats(int buffer, int64_t row, int thread = 0) const {
    const View& view = views_[buffer];
    return reinterpret_cast<float*>(view.base + row * view.row_stride + thread * view.thread_stride);
  }
  int64_t stride(int buffer) const { return int64_t(views_[buffer].row_stride / sizeof(float)); }  // in floats
  const float* vector(int index) const { return index < 0 ? nullptr : plan_.vectors[index].data(); }

  void pack();
  void place_buffers(const Step& step);
  void copy_blocks(const Step& step, int thread);
  void work(const Step& step, int thread);
  void row_part(const Step& step, const Stage& stage, Part& part, int thread);
  void keep(const Step& step, const Stage& stage, int64_t step_row);
  void row_op(const RowOp& op, const Step& step, int64_t row, int64_t step_row, int thread);
  void multiply(const Step& step, const Stage& stage, Part& part, int thread);
  void multiply_part(const Step& step, const Matmul& matmul, Range rows, Range tiles, int thread);
  void attend(const Stage& stage, Part* parts, int thread);

  Plan plan_;  // only how KV is kept changes
  const Kernels& kernels_;
  const int64_t vocab_size_;
  std::unique_ptr<Threads> threads_;

  Memory packed_memory_;
  std::vector<Packed> packed_;          // by matrix
  std::vector<size_t> layer_offsets_;   // by attend layer: its first byte in a block
  std::vector<size_t> attend_slots_;    // by attend layer: which of its stage's it is
  std::vector<size_t> block_bytes_;     // by group
  std::vector<Pool> pools_;
  std::vector<int> first_part_;         // by stage: its row part, its products, its attends
  std::unique_ptr<Part[]> parts_;
  int num_parts_ = 0;                   // and one more, which copies blocks

  // Of the running step.
  Memory arenas_[3];                    // by domain
  Memory scratch_;                      // of attention
  Memory head_rows_;                    // prepared, of `head`
  std::vector<View> views_;             // by buffer
  std::vector<AttendStep> attend_steps_;      // by attend layer
  std::vector<uint8_t*> shared_scratch_;      // by attend layer
  std::vector<int64_t> num_attend_items_;     // by attend layer
  uint8_t* thread_scratch_ = nullptr;         // of thread 0; the others' are strides behind
  size_t thread_stride_ = 0;
  std::vector<double> profile_;
};

}  // namespace spolia
