// How the attention of one step is cut into work items.
//
//     tile   a few rows (query tile) whose heads of one KV head meet each loaded K and V together
//     item   one tile, one KV head, a run of the tile's splits
//
// An item that covers all splits of its rows finishes them ("whole"). Otherwise each split leaves a partial result, one
// record [width + 16 floats: out, maximum, sum] a (row, split, head), and `merge` folds a row's records in position order:
// the arithmetic is the same, so where a plan cuts is a matter of speed alone.
//
//     shared scratch   PlanHeader | seqs | partials | tile_rows | items | records
#pragma once
#include <cstdint>

#include "attend_kv.h"

namespace spolia::SPOLIA_LEVEL {
namespace {

constexpr int64_t kTileHeads = 24;   // query heads (rows x heads of a KV head) that a tile aims for
constexpr int64_t kMinItems = 64;    // a step of any size is cut at least this fine, so that threads end together
constexpr int64_t kSplitCost = 8;    // cost of a split's loads, in query heads

struct Item {
  int32_t tile_begin, num_rows;  // range of tile_rows
  int32_t kv_head;
  int32_t split_begin, split_end;
  int32_t whole;
};

struct PlanHeader {
  int64_t num_items;
  size_t seqs, partials, tile_rows, items, records;  // offsets in bytes from the header
};

struct Plan {  // a view of shared scratch
  const PlanHeader* header;
  const int32_t* seqs;       // [num_rows] the row's sequence
  const int64_t* partials;   // [num_rows] record of the row's first split, in units of one record a head; -1: row is whole
  const int32_t* tile_rows;
  const Item* items;
  float* records;
};

inline Plan plan_view(uint8_t* scratch) {
  const auto* header = reinterpret_cast<const PlanHeader*>(scratch);
  return {header,
          reinterpret_cast<const int32_t*>(scratch + header->seqs),
          reinterpret_cast<const int64_t*>(scratch + header->partials),
          reinterpret_cast<const int32_t*>(scratch + header->tile_rows),
          reinterpret_cast<const Item*>(scratch + header->items),
          reinterpret_cast<float*>(scratch + header->records)};
}

// The tokens [begin, end) that a row at `position` attends to.
inline int64_t first_token(const AttendShape& shape, int64_t position) {
  const int64_t begin = position + 1 - shape.window;
  return shape.window > 0 && begin > 0 ? begin : 0;
}
inline int64_t first_split(const AttendShape& shape, int64_t position) { return first_token(shape, position) / kSplit; }
inline int64_t end_split(int64_t position) { return position / kSplit + 1; }

inline int64_t record_floats(const AttendShape& shape) { return round_up(shape.head_dim, kBlock) + 16; }

// Cuts a step, first to count (`bytes` null), then to write.
class Planner {
 public:
  Planner(const AttendShape& shape, const AttendStep& step) : shape_(shape), step_(step) {
    heads_per_row_ = shape.num_heads / shape.num_kv_heads;
    rows_per_tile_ = kTileHeads > heads_per_row_ ? kTileHeads / heads_per_row_ : 1;
    int64_t cost = 0;
    for (int64_t s = 0; s < step.num_seqs; ++s)
      for (int64_t row = step.row_starts[s]; row < step.row_starts[s + 1]; row += rows_per_tile_)
        cost += num_splits(row, tile_end(s, row)) * split_cost(tile_end(s, row) - row);
    item_cost_ = cost * shape.num_kv_heads / kMinItems;
    cut();
    header_.num_items = num_items_;
    size_t end = 0;
    const auto place = [&end](size_t bytes) {
      const size_t begin = end;
      end += (bytes + 63) / 64 * 64;
      return begin;
    };
    const auto num_rows = static_cast<size_t>(step.row_starts[step.num_seqs]);
    place(sizeof(PlanHeader));
    header_.seqs = place(num_rows * sizeof(int32_t));
    header_.partials = place(num_rows * sizeof(int64_t));
    header_.tile_rows = place(static_cast<size_t>(num_tile_rows_) * sizeof(int32_t));
    header_.items = place(static_cast<size_t>(num_items_) * sizeof(Item));
    header_.records = place(static_cast<size_t>(num_partials_ * shape.num_heads * record_floats(shape)) * sizeof(float));
    bytes_ = end;
  }

  size_t bytes() const { return bytes_; }

  int64_t write(uint8_t* scratch) {
    *reinterpret_cast<PlanHeader*>(scratch) = header_;
    seqs_ = reinterpret_cast<int32_t*>(scratch + header_.seqs);
    partials_ = reinterpret_cast<int64_t*>(scratch + header_.partials);
    tile_rows_ = reinterpret_cast<int32_t*>(scratch + header_.tile_rows);
    items_ = reinterpret_cast<Item*>(scratch + header_.items);
    cut();
    return num_items_;
  }

 private:
  int64_t tile_end(int64_t seq, int64_t row) const {
    const int64_t end = row + rows_per_tile_, limit = step_.row_starts[seq + 1];
    return end < limit ? end : limit;
  }
  int64_t num_splits(int64_t row, int64_t row_end) const {
    return end_split(step_.positions[row_end - 1]) - first_split(shape_, step_.positions[row]);
  }
  int64_t split_cost(int64_t num_rows) const { return num_rows * heads_per_row_ + kSplitCost; }

  void cut() {
    num_items_ = num_tile_rows_ = num_partials_ = 0;
    for (int64_t s = 0; s < step_.num_seqs; ++s) {
      // Last tile first: in a prefill it is the longest.
      const int64_t begin = step_.row_starts[s], end = step_.row_starts[s + 1];
      for (int64_t row = begin + (end - begin - 1) / rows_per_tile_ * rows_per_tile_; row >= begin && row < end;
           row -= rows_per_tile_)
        cut_tile(s, row, tile_end(s, row));
    }
  }

  void cut_tile(int64_t seq, int64_t row, int64_t row_end) {
    const int64_t begin = first_split(shape_, step_.positions[row]), count = num_splits(row, row_end);
    const int64_t fit = item_cost_ / split_cost(row_end - row);
    const int64_t num_runs = fit > 0 ? (count + fit - 1) / fit : count;
    if (items_) {
      for (int64_t r = row; r < row_end; ++r) {
        seqs_[r] = static_cast<int32_t>(seq);
        partials_[r] = -1;
        tile_rows_[num_tile_rows_ + r - row] = static_cast<int32_t>(r);
      }
      Item* item = items_ + num_items_;
      for (int64_t h = 0; h < shape_.num_kv_heads; ++h)
        for (int64_t run = 0; run < num_runs; ++run)
          *item++ = {static_cast<int32_t>(num_tile_rows_), static_cast<int32_t>(row_end - row), static_cast<int32_t>(h),
                     static_cast<int32_t>(begin + count * run / num_runs),
                     static_cast<int32_t>(begin + count * (run + 1) / num_runs), num_runs == 1};
    }
    if (num_runs > 1)
      for (int64_t r = row; r < row_end; ++r) {
        if (items_) partials_[r] = num_partials_;
        num_partials_ += num_splits(r, r + 1);
      }
    num_tile_rows_ += row_end - row;
    num_items_ += num_runs * shape_.num_kv_heads;
  }

  const AttendShape& shape_;
  const AttendStep& step_;
  int64_t heads_per_row_, rows_per_tile_, item_cost_;
  int64_t num_items_ = 0, num_tile_rows_ = 0, num_partials_ = 0;
  size_t bytes_ = 0;
  PlanHeader header_{};
  int32_t* seqs_ = nullptr;
  int64_t* partials_ = nullptr;
  int32_t* tile_rows_ = nullptr;
  Item* items_ = nullptr;
};

}  // namespace
}  // namespace spolia::SPOLIA_LEVEL
