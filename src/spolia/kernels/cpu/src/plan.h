// What lowering.py makes of a program: stages of row-wise work and of matrix products, over planned buffers.
//
// A stage has two parts. Its row part takes each row through a chain of ops, all of them on one thread while the row is in
// its cache; its heavy part runs matrix products and attention, cut by columns and by heads. All threads meet after each part.
// Indices that do not apply are -1.
#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "isa.h"

namespace spolia {

// What a buffer has one row for: each row of the step, each row whose logits are wanted, or each thread.
enum class Domain { Step, Logits, Thread };

struct Buffer {
  Domain domain;
  size_t offset;     // bytes of its domain's arena, per row, that lie before it
  size_t row_bytes;  // from a row to the next, a multiple of 64
};

struct Matrix {  // as it lies in the file
  std::string name;
  WeightType type;
  const uint8_t* data;
  size_t row_bytes;
  int64_t n, k;
};

struct Rope {
  std::vector<float> inv_freq;
  float scale;
};

enum class RowOpKind { RopeTable, Embed, Gather, RmsNorm, LayerNorm, Rope, Glu, Activation, Add, Scale, Prepare };

struct RowOp {
  RowOpKind kind;
  int out, a, b;     // buffers; Rope: b is the table of cosines and sines; Gather: a has a row for each row of the step
  int64_t width;
  int weight, bias;  // vectors
  int index;         // Embed: matrix of `tables`; RopeTable: entry of `ropes`
  int64_t group;     // RmsNorm: columns that share a mean; Rope: head_dim
  int64_t half;      // Rope: columns turned, by two
  float factor;      // norms: eps; Embed, Scale: factor
  Act act;
  RowKind row_kind;  // Prepare
};

// out = rows @ matrix.T + bias, then one of: + residual; scaled and capped; * act(rows @ gate.T + gate_bias).
struct Matmul {
  int matrix;
  int rows;      // buffer of prepared rows
  RowKind row_kind;  // how they are prepared
  int out;       // buffer; -1: the logits
  int bias;      // vector
  int residual;  // buffer
  float scale, softcap;
  int gate;      // matrix
  int gate_bias;
  Act act;
};

struct AttendLayer {
  int q, k, v, out;
  int group;
  AttendShape shape;
};

struct Stage {
  Domain domain;                // Step or Logits
  std::vector<int> merges;      // attend layers whose splits are merged first
  std::vector<RowOp> row_ops;
  std::vector<std::pair<int, int>> keeps;  // (buffer, layer): what that layer begins with, for whoever asks
  std::vector<int> stores;      // attend layers whose k and v are stored last
  std::vector<Matmul> matmuls;
  std::vector<int> attends;     // attend layers
};

struct Plan {
  std::vector<Buffer> buffers;
  size_t arena_row_bytes[3];  // by domain
  std::vector<std::vector<float>> vectors;
  std::vector<Matrix> matrices;  // packed at load
  std::vector<Matrix> tables;    // read a row at a time, where they lie
  std::vector<Rope> ropes;
  std::vector<AttendLayer> layers;
  std::vector<std::vector<int>> groups;  // layers of each cache group, in the order of their bytes in a block
  std::vector<Stage> stages;
  int hidden;           // buffer of what the head reads, before it is prepared
  int64_t hidden_size;  // its columns
  int64_t num_layers;   // whose beginnings are kept
};

}  // namespace spolia
