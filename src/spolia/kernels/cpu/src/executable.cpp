#include "executable.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

namespace spolia {
namespace {

constexpr int64_t kTile = 16;                     // output columns that a packed matrix is cut by
constexpr int64_t kChunksPerThread = 4;           // how finely work is cut: late threads wait less, early ones count more
constexpr size_t kRowBlockBytes = size_t{256} << 10;  // prepared rows that stay in a core's L2 while tiles pass
constexpr int64_t kOwnRows = 32;                   // rows a thread, from which it pays that each has rows of its own
constexpr int64_t kRowMultiple = 16;              // row blocks are whole numbers of these, but the last
// A gate's product stays in a core's cache until its sibling's meets it: that many rows by tiles at a time.
constexpr int64_t kGateRows = 64, kGateTiles = 16;
constexpr int64_t kGateStride = kGateTiles * kTile + 16;  // floats; no power of two

size_t align(size_t bytes, size_t to = 64) { return (bytes + to - 1) / to * to; }
int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Whether they can share a plan of work items.
bool alike(const AttendLayer& a, const AttendLayer& b) {
  return a.group == b.group && a.shape.kv_type == b.shape.kv_type && a.shape.num_heads == b.shape.num_heads &&
         a.shape.num_kv_heads == b.shape.num_kv_heads && a.shape.head_dim == b.shape.head_dim &&
         a.shape.window == b.shape.window;
}

[[noreturn]] void refuse(const std::string& message) { throw std::invalid_argument(message); }

void check_range(const char* name, int64_t index, int64_t value, int64_t limit) {
  if (value < 0 || value >= limit)
    refuse(std::string(name) + "[" + std::to_string(index) + "] = " + std::to_string(value) + " is not in [0, " + std::to_string(limit) + ")");
}

}  // namespace

Executable::Executable(Plan plan, const Kernels& kernels, int64_t vocab_size, int num_threads)
    : plan_(std::move(plan)), kernels_(kernels), vocab_size_(vocab_size), threads_(std::make_unique<Threads>(num_threads)) {
  attend_slots_.resize(plan_.layers.size());
  if (!plan_.layers.empty()) set_kv_type(plan_.layers[0].shape.kv_type);
  for (const Stage& stage : plan_.stages) {
    first_part_.push_back(num_parts_);
    num_parts_ += 2 + int(stage.attends.size());
    for (size_t i = 0; i < stage.attends.size(); ++i) attend_slots_[stage.attends[i]] = i;
  }
  parts_ = std::make_unique<Part[]>(size_t(num_parts_) + 1);
  views_.resize(plan_.buffers.size());
  attend_steps_.resize(plan_.layers.size());
  shared_scratch_.resize(plan_.layers.size());
  num_attend_items_.resize(plan_.layers.size());
  profile_.resize(2 * plan_.stages.size());
  pack();
}

void Executable::set_kv_type(KvType kv_type) {
  for (const AttendLayer& layer : plan_.layers)
    if (kv_type == KvType::INT8 && layer.shape.head_dim > kMostScaledDim)
      refuse("KV in int8: head_dim is " + std::to_string(layer.shape.head_dim) + ", at most " + std::to_string(kMostScaledDim) + " is possible");
  for (AttendLayer& layer : plan_.layers) layer.shape.kv_type = kv_type;
  pools_.clear();
  block_bytes_.clear();
  layer_offsets_.resize(plan_.layers.size());
  for (const std::vector<int>& group : plan_.groups) {
    size_t offset = 0;
    for (int layer : group) {
      layer_offsets_[layer] = offset;
      offset += kernels_.attend.layer_bytes(plan_.layers[layer].shape);
    }
    block_bytes_.push_back(offset);
  }
}

void Executable::pack() {
  constexpr int64_t kTilesPerItem = 16;
  size_t num_bytes = 0;
  std::vector<int64_t> first_item;
  int64_t num_items = 0;
  std::vector<size_t> offsets;
  for (const Matrix& matrix : plan_.matrices) {
    offsets.push_back(num_bytes);
    first_item.push_back(num_items);
    num_bytes += align(kernels_.linear.packed_bytes(matrix.type, matrix.n, matrix.k));
    num_items += ceil_div(ceil_div(matrix.n, kTile), kTilesPerItem);
  }
  packed_memory_ = Memory(num_bytes);
  for (size_t i = 0; i < plan_.matrices.size(); ++i) {
    const Matrix& matrix = plan_.matrices[i];
    packed_.push_back({matrix.type, matrix.n, matrix.k, packed_memory_.data() + offsets[i]});
  }
  Part part;
  auto job = [&](int thread) {
    threads_->share(part, num_items, thread, [&](int64_t item) {
      const size_t i = size_t(std::upper_bound(first_item.begin(), first_item.end(), item) - first_item.begin()) - 1;
      const Matrix& matrix = plan_.matrices[i];
      const int64_t begin = (item - first_item[i]) * kTilesPerItem;
      const int64_t end = std::min(begin + kTilesPerItem, ceil_div(matrix.n, kTile));
      kernels_.linear.pack(matrix.type, matrix.data, matrix.row_bytes, matrix.n, matrix.k, begin, end,
                           packed_memory_.data() + offsets[i]);
    });
  };
  threads_->run(job);
}

void Executable::check(const Step& step) const {
  for (const Matrix& table : plan_.tables)
    for (int64_t i = 0; i < step.num_rows; ++i) check_range("token_ids", i, step.token_ids[i], table.n);
  if (step.row_starts[0] != 0 || step.row_starts[step.num_seqs] != step.num_rows)
    refuse("row_starts go from " + std::to_string(step.row_starts[0]) + " to " +
           std::to_string(step.row_starts[step.num_seqs]) + ", not from 0 to num_rows = " + std::to_string(step.num_rows));
  for (int64_t s = 0; s < step.num_seqs; ++s) {
    const int64_t begin = step.row_starts[s], end = step.row_starts[s + 1];
    if (end <= begin || end > step.num_rows)
      refuse("row_starts[" + std::to_string(s + 1) + "] = " + std::to_string(end) + " after " + std::to_string(begin) +
             ": a sequence has at least one row");
    if (step.positions[begin] < 0)
      refuse("positions[" + std::to_string(begin) + "] = " + std::to_string(step.positions[begin]) + " is negative");
    for (int64_t i = begin + 1; i < end; ++i)
      if (step.positions[i] != step.positions[begin] + (i - begin))
        refuse("positions[" + std::to_string(i) + "] = " + std::to_string(step.positions[i]) + " does not follow " +
               std::to_string(step.positions[i - 1]) + " in the same sequence");
  }
  for (int64_t i = 0; i < step.num_logit_rows; ++i) {
    check_range("logit_rows", i, step.logit_rows[i], step.num_rows);
    if (i > 0 && step.logit_rows[i] <= step.logit_rows[i - 1])
      refuse("logit_rows[" + std::to_string(i) + "] = " + std::to_string(step.logit_rows[i]) + " is not above the one before");
  }
  if (pools_.size() != plan_.groups.size()) refuse("no KV pools: call bind_kv first");
  if (step.block_tables.size() != plan_.groups.size())
    refuse(std::to_string(step.block_tables.size()) + " block tables for " + std::to_string(plan_.groups.size()) + " cache groups");
  for (size_t g = 0; g < plan_.groups.size(); ++g) {
    const BlockTable& table = step.block_tables[g];
    const int64_t window = plan_.layers[plan_.groups[g].front()].shape.window;
    const std::string name = "block_tables[" + std::to_string(g) + "]";
    for (int64_t s = 0; s < step.num_seqs; ++s) {
      const int64_t first = step.positions[step.row_starts[s]], last = step.positions[step.row_starts[s + 1] - 1];
      const int64_t begin = window > 0 ? std::max<int64_t>(0, first - window + 1) / kBlock : 0;
      if (last / kBlock >= table.max_blocks)
        refuse(name + " has " + std::to_string(table.max_blocks) + " blocks a sequence; position " + std::to_string(last) + " needs more");
      const std::string row = name + "[" + std::to_string(s) + "]";
      for (int64_t b = begin; b <= last / kBlock; ++b)
        check_range(row.c_str(), b, table.data[s * table.max_blocks + b], pools_[g].num_blocks);
    }
  }
  for (size_t i = 0; i < step.copies.size(); ++i) {
    const BlockCopy& copy = step.copies[i];
    check_range("copies.group", int64_t(i), copy.group, int64_t(plan_.groups.size()));
    check_range("copies.src", int64_t(i), copy.src, pools_[copy.group].num_blocks);
    check_range("copies.dst", int64_t(i), copy.dst, pools_[copy.group].num_blocks);
    check_range("copies.num_tokens", int64_t(i), copy.num_tokens, kBlock + 1);
  }
}

void Executable::run(const Step& step) {
  place_buffers(step);
  for (int i = 0; i < num_parts_ + 1; ++i) parts_[i].reset(threads_->size());
  auto job = [&](int thread) { work(step, thread); };
  threads_->run(job);
  if (step.hidden)
    for (int64_t row = 0; row < step.num_logit_rows; ++row)
      std::memcpy(step.hidden + row * hidden_size(), floats(plan_.hidden, row), size_t(hidden_size()) * sizeof(float));
}

void Executable::head(const float* hidden, int64_t num_rows, float* logits) {
  const Matmul& matmul = plan_.stages.back().matmuls.back();
  const Packed& packed = packed_[matmul.matrix];
  const size_t row_bytes = kernels_.linear.row_bytes(matmul.row_kind, hidden_size());
  head_rows_.reserve(row_bytes * size_t(num_rows));
  for (int64_t row = 0; row < num_rows; ++row)
    kernels_.linear.prepare_row(matmul.row_kind, hidden + row * hidden_size(), hidden_size(), head_rows_.data() + size_t(row) * row_bytes);
  const int64_t tiles = ceil_div(packed.n, kTile), chunk = std::max<int64_t>(1, tiles / (threads_->size() * kChunksPerThread));
  Part part;
  auto job = [&](int thread) {
    threads_->share(part, ceil_div(tiles, chunk), thread, [&](int64_t item) {
      const int64_t begin = item * chunk, end = std::min(begin + chunk, tiles);
      const int64_t column = begin * kTile, num_columns = std::min(end * kTile, packed.n) - column;
      kernels_.linear.run(packed, matmul.row_kind, head_rows_.data(), num_rows, logits, vocab_size_, {vector(matmul.bias), nullptr, 0}, begin, end);
      if (matmul.scale != 1.0f || matmul.softcap != 0.0f)
        for (int64_t row = 0; row < num_rows; ++row)
          kernels_.rowwise.softcap(logits + row * vocab_size_ + column, num_columns, matmul.scale, matmul.softcap);
    });
  };
  threads_->run(job);
}

void Executable::argmax(const float* rows, int64_t num_rows, int64_t width, int64_t* best) {
  Part part;
  auto job = [&](int thread) {
    threads_->share(part, num_rows, thread, [&](int64_t row) { best[row] = kernels_.rowwise.argmax(rows + row * width, width); });
  };
  threads_->run(job);
}

std::vector<double> Executable::take_profile() {
  std::vector<double> taken(profile_.size());
  std::swap(taken, profile_);
  return taken;
}

void Executable::place_buffers(const Step& step) {
  const int64_t num_rows[] = {step.num_rows, step.num_logit_rows, threads_->size()};
  for (Domain domain : {Domain::Step, Domain::Logits})
    arenas_[int(domain)].reserve(plan_.arena_row_bytes[int(domain)] * size_t(num_rows[int(domain)]));

  // A thread's arena is its one row of private buffers, then scratch for the heavy parts; threads are whole pages apart.
  size_t scratch_bytes = size_t(kGateRows * kGateStride) * sizeof(float);
  for (const AttendLayer& layer : plan_.layers)
    scratch_bytes = std::max(scratch_bytes, kernels_.attend.thread_scratch_bytes(layer.shape));
  const size_t private_bytes = plan_.arena_row_bytes[int(Domain::Thread)];
  thread_stride_ = align(private_bytes + scratch_bytes, 4096);
  arenas_[int(Domain::Thread)].reserve(thread_stride_ * size_t(threads_->size()));
  thread_scratch_ = arenas_[int(Domain::Thread)].data() + private_bytes;

  for (size_t i = 0; i < plan_.buffers.size(); ++i) {
    const Buffer& buffer = plan_.buffers[i];
    uint8_t* arena = arenas_[int(buffer.domain)].data();
    if (buffer.domain == Domain::Thread) views_[i] = {arena + buffer.offset, 0, thread_stride_};
    else views_[i] = {arena + buffer.offset * size_t(num_rows[int(buffer.domain)]), buffer.row_bytes, 0};
  }

  for (size_t i = 0; i < plan_.layers.size(); ++i) {
    const AttendLayer& layer = plan_.layers[i];
    const BlockTable& table = step.block_tables[layer.group];
    attend_steps_[i] = {pools_[layer.group].data, block_bytes_[layer.group], layer_offsets_[i], table.data,
                        table.max_blocks, step.row_starts, step.positions, step.num_seqs,
                        floats(layer.q, 0), stride(layer.q), floats(layer.k, 0), stride(layer.k),
                        floats(layer.v, 0), stride(layer.v), floats(layer.out, 0), stride(layer.out)};
  }

  // Layers of one shape and group share their plan of work items and, stage after stage, the scratch behind it: a layer
  // takes those of its `source`, the first one like it.
  std::vector<size_t> source(plan_.layers.size()), offsets(plan_.layers.size());
  size_t shared_bytes = 0;
  for (size_t i = 0; i < plan_.layers.size(); ++i) {
    source[i] = 0;
    while (!alike(plan_.layers[source[i]], plan_.layers[i]) || attend_slots_[source[i]] != attend_slots_[i]) ++source[i];
    if (source[i] != i) continue;
    offsets[i] = shared_bytes;
    shared_bytes += align(kernels_.attend.shared_scratch_bytes(plan_.layers[i].shape, attend_steps_[i]));
  }
  scratch_.reserve(shared_bytes);
  for (size_t i = 0; i < plan_.layers.size(); ++i) {
    shared_scratch_[i] = scratch_.data() + offsets[source[i]];
    num_attend_items_[i] = source[i] == i ? kernels_.attend.plan(plan_.layers[i].shape, attend_steps_[i], shared_scratch_[i])
                                          : num_attend_items_[source[i]];
  }
}

void Executable::copy_blocks(const Step& step, int thread) {
  const auto num_layers = int64_t(plan_.layers.size());
  threads_->share(parts_[num_parts_], num_layers, thread, [&](int64_t i) {
    const AttendLayer& layer = plan_.layers[i];
    for (const BlockCopy& copy : step.copies) {
      if (copy.group != layer.group) continue;
      uint8_t* pool = pools_[copy.group].data + layer_offsets_[i];
      kernels_.attend.copy_tokens(layer.shape, pool + size_t(copy.src) * block_bytes_[copy.group],
                                  pool + size_t(copy.dst) * block_bytes_[copy.group], copy.num_tokens);
    }
  });
  threads_->await(parts_[num_parts_], num_layers);
}

void Executable::work(const Step& step, int thread) {
  using Clock = std::chrono::steady_clock;
  const bool timed = profiling && thread == 0;
  Clock::time_point before;
  if (timed) before = Clock::now();
  auto note = [&](size_t part) {
    if (!timed) return;
    const Clock::time_point now = Clock::now();
    profile_[part] += std::chrono::duration<double>(now - before).count();
    before = now;
  };

  if (!step.copies.empty()) copy_blocks(step, thread);
  for (size_t i = 0; i < plan_.stages.size(); ++i) {
    const Stage& stage = plan_.stages[i];
    if ((stage.domain == Domain::Logits ? step.num_logit_rows : step.num_rows) == 0) break;
    Part* parts = &parts_[first_part_[i]];
    row_part(step, stage, parts[0], thread);
    note(2 * i);
    multiply(step, stage, parts[1], thread);
    attend(stage, parts + 2, thread);
    note(2 * i + 1);
  }
}

void Executable::row_part(const Step& step, const Stage& stage, Part& part, int thread) {
  const bool of_logits = stage.domain == Domain::Logits;
  const int64_t num_rows = of_logits ? step.num_logit_rows : step.num_rows;
  // Few rows go out one by one; many in whole blocks, so that no two threads store to one.
  int64_t chunk = std::max<int64_t>(1, num_rows / (threads_->size() * kChunksPerThread));
  if (chunk > kBlock) chunk = chunk / kBlock * kBlock;
  const int64_t num_items = ceil_div(num_rows, chunk);
  threads_->share(part, num_items, thread, [&](int64_t item) {
    const int64_t begin = item * chunk, end = std::min(begin + chunk, num_rows);
    if (!of_logits)
      for (int i : stage.merges) kernels_.attend.merge(plan_.layers[i].shape, attend_steps_[i], begin, end, shared_scratch_[i]);
    for (int64_t row = begin; row < end; ++row) {
      const int64_t step_row = of_logits ? step.logit_rows[row] : row;
      if (of_logits)
        for (int i : stage.merges)
          kernels_.attend.merge(plan_.layers[i].shape, attend_steps_[i], step_row, step_row + 1, shared_scratch_[i]);
      for (const RowOp& op : stage.row_ops) row_op(op, step, row, step_row, thread);
      if (step.layers) keep(step, stage, step_row);
    }
    for (int i : stage.stores) kernels_.attend.store(plan_.layers[i].shape, attend_steps_[i], begin, end);
  });
  threads_->await(part, num_items);
}

// Of a stage that has a row for each row of the step.
void Executable::keep(const Step& step, const Stage& stage, int64_t step_row) {
  const int32_t* end = step.logit_rows + step.num_logit_rows;
  const int32_t* found = std::lower_bound(step.logit_rows, end, int32_t(step_row));
  if (found == end || *found != step_row) return;
  for (const auto& [buffer, layer] : stage.keeps)
    std::memcpy(step.layers + (layer * step.num_logit_rows + (found - step.logit_rows)) * hidden_size(), floats(buffer, step_row),
                size_t(hidden_size()) * sizeof(float));
}

void Executable::row_op(const RowOp& op, const Step& step, int64_t row, int64_t step_row, int thread) {
  const RowwiseKernels& k = kernels_.rowwise;
  float* out = floats(op.out, row, thread);
  auto in = [&](int buffer) { return floats(buffer, row, thread); };
  switch (op.kind) {
    case RowOpKind::RopeTable: {
      const Rope& rope = plan_.ropes[op.index];
      const size_t half = rope.inv_freq.size();
      for (size_t i = 0; i < half; ++i) {
        const float angle = float(step.positions[step_row]) * rope.inv_freq[i];
        out[i] = std::cos(angle) * rope.scale;
        out[half + i] = std::sin(angle) * rope.scale;
      }
      break;
    }
    case RowOpKind::Embed: {
      const Matrix& table = plan_.tables[op.index];
      const uint8_t* entry = table.data + size_t(step.token_ids[step_row]) * table.row_bytes;
      kernels_.linear.dequantize_row(table.type, entry, table.k, op.factor, out);
      break;
    }
    case RowOpKind::Gather: std::memcpy(out, floats(op.a, step_row), size_t(op.width) * sizeof(float)); break;
    case RowOpKind::RmsNorm: k.rms_norm(in(op.a), vector(op.weight), op.width, op.group, op.factor, out); break;
    case RowOpKind::LayerNorm: k.layer_norm(in(op.a), vector(op.weight), vector(op.bias), op.width, op.factor, out); break;
    case RowOpKind::Rope: k.rope(in(op.a), in(op.b), in(op.b) + op.half, op.half, op.group, op.width, out); break;
    case RowOpKind::Glu: k.glu(in(op.a), in(op.b), op.width, op.act, out); break;
    case RowOpKind::Activation: k.activation(in(op.a), op.width, op.act, out); break;
    case RowOpKind::Add: k.add(in(op.a), in(op.b), op.width, out); break;
    case RowOpKind::Scale: k.scale(in(op.a), op.factor, op.width, out); break;
    case RowOpKind::Prepare:
      kernels_.linear.prepare_row(op.row_kind, in(op.a), op.width, reinterpret_cast<uint8_t*>(out));
      break;
  }
}

// All products of the stage, cut into blocks of rows by chunks of tiles.
void Executable::multiply(const Step& step, const Stage& stage, Part& part, int thread) {
  if (stage.matmuls.empty() || (!step.logits && stage.matmuls.front().out < 0)) return;  // the head is alone in its stage
  const int64_t num_rows = stage.domain == Domain::Logits ? step.num_logit_rows : step.num_rows;
  int64_t num_tiles = 0;
  for (const Matmul& matmul : stage.matmuls) num_tiles += ceil_div(packed_[matmul.matrix].n, kTile);
  const int64_t whole = std::max<int64_t>(1, num_tiles / (threads_->size() * kChunksPerThread));

  auto tile_chunk = [&](const Matmul& matmul) { return matmul.gate < 0 ? whole : std::min(whole, kGateTiles); };
  auto row_block = [&](const Matmul& matmul) {
    int64_t most = std::max<int64_t>(kRowMultiple, int64_t(kRowBlockBytes / views_[matmul.rows].row_stride));
    if (num_rows >= kOwnRows * threads_->size()) most = std::min(most, ceil_div(num_rows, threads_->size()));
    const int64_t even = ceil_div(num_rows, ceil_div(num_rows, most));
    return ceil_div(even, kRowMultiple) * kRowMultiple;
  };
  auto num_items_of = [&](const Matmul& matmul) {
    return ceil_div(num_rows, row_block(matmul)) * ceil_div(ceil_div(packed_[matmul.matrix].n, kTile), tile_chunk(matmul));
  };
  int64_t num_items = 0;
  for (const Matmul& matmul : stage.matmuls) num_items += num_items_of(matmul);

  threads_->share(part, num_items, thread, [&](int64_t item) {
    const Matmul* matmul = stage.matmuls.data();
    for (; item >= num_items_of(*matmul); ++matmul) item -= num_items_of(*matmul);
    const int64_t tiles = ceil_div(packed_[matmul->matrix].n, kTile), chunk = tile_chunk(*matmul);
    const int64_t chunks = ceil_div(tiles, chunk), rows = row_block(*matmul);
    const int64_t row = item / chunks * rows, tile = item % chunks * chunk;
    multiply_part(step, *matmul, {row, std::min(row + rows, num_rows)}, {tile, std::min(tile + chunk, tiles)}, thread);
  });
  threads_->await(part, num_items);
}

void Executable::multiply_part(const Step& step, const Matmul& matmul, Range rows, Range tiles, int thread) {
  const Packed& packed = packed_[matmul.matrix];
  const View& prepared = views_[matmul.rows];
  const int64_t column = tiles.begin * kTile, num_columns = std::min(tiles.end * kTile, packed.n) - column;
  const int64_t ld_out = matmul.out < 0 ? vocab_size_ : stride(matmul.out);
  const int64_t max_rows = matmul.gate < 0 ? rows.end - rows.begin : kGateRows;
  for (int64_t row = rows.begin; row < rows.end; row += max_rows) {
    const int64_t num_rows = std::min(max_rows, rows.end - row);
    const uint8_t* x = prepared.base + size_t(row) * prepared.row_stride;
    float* out = matmul.out < 0 ? step.logits + row * ld_out : floats(matmul.out, row);
    Epilogue epilogue{vector(matmul.bias), nullptr, 0};
    if (matmul.residual >= 0) epilogue = {epilogue.bias, floats(matmul.residual, row), stride(matmul.residual)};
    kernels_.linear.run(packed, matmul.row_kind, x, num_rows, out, ld_out, epilogue, tiles.begin, tiles.end);
    if (matmul.gate >= 0) {
      float* gate = reinterpret_cast<float*>(thread_scratch_ + size_t(thread) * thread_stride_);
      // The kernel writes tile t at column 16 t: shifted, so that the first of ours is at the scratch's begin.
      kernels_.linear.run(packed_[matmul.gate], matmul.row_kind, x, num_rows, gate - column, kGateStride, {vector(matmul.gate_bias), nullptr, 0},
                          tiles.begin, tiles.end);
      for (int64_t i = 0; i < num_rows; ++i) {
        float* up = out + i * ld_out + column;
        kernels_.rowwise.glu(gate + i * kGateStride, up, num_columns, matmul.act, up);
      }
    } else if (matmul.scale != 1.0f || matmul.softcap != 0.0f) {
      for (int64_t i = 0; i < num_rows; ++i)
        kernels_.rowwise.softcap(out + i * ld_out + column, num_columns, matmul.scale, matmul.softcap);
    }
  }
}

void Executable::attend(const Stage& stage, Part* parts, int thread) {
  for (size_t n = 0; n < stage.attends.size(); ++n) {
    const int i = stage.attends[n];
    threads_->share(parts[n], num_attend_items_[i], thread, [&](int64_t item) {
      kernels_.attend.item(plan_.layers[i].shape, attend_steps_[i], item, shared_scratch_[i],
                           thread_scratch_ + size_t(thread) * thread_stride_);
    });
    threads_->await(parts[n], num_attend_items_[i]);
  }
}

}  // namespace spolia
