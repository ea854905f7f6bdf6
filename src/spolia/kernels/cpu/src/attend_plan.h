// How the attention of one step is cut into work items.
//
//     tile   a few rows (query tile) whose heads of one KV head meet each loaded K and V together
//     item   one tile, one KV head, a run of the tile's splits
//
// An item that covers all splits of its rows finishes them ("whole"). Otherwise each split leaves a partial result, one
// record [width + 16 floats: out, maximum, sum] a (row, split, head), and `merge` folds a row's records in position order:
// the arithmetic is the same, so where a plan cuts is a matter of speed alone.
//
// Sequences whose block tables begin with the same blocks meet them together: for each whole split that several share there
// are tiles of all their rows, so a shared block is read once a tile and not once a sequence. A row's records are as ever.
//
//     tables, sorted    A A B C        splits 0-1 (A A): one set of tiles of the rows of all three
//                       A A B D        split 2 (B): one set of tiles of the rows of two
//                       A A E          the rest of each sequence: tiles of its own
//
//     shared scratch   PlanHeader | seqs | partials | tile_rows | items | records
#pragma once
#include <cstdint>
#include <cstring>
#include <new>

#include "attend_kv.h"
#include "attend_matrix.h"

namespace spolia::SPOLIA_LEVEL {
namespace {

constexpr int64_t kTileHeads = kHasMatrix ? 48 : 30;   // query heads (rows x heads of a KV head) that a tile aims for
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

// Cuts a step into items: first to learn its cost, then to count, then to write.
class Planner {
 public:
  Planner(const AttendShape& shape, const AttendStep& step) : shape_(shape), step_(step) {
    heads_per_row_ = shape.num_heads / shape.num_kv_heads;
    rows_per_tile_ = kTileHeads > heads_per_row_ ? kTileHeads / heads_per_row_ : 1;
    seqs_sorted_ = static_cast<Sorted*>(::operator new(static_cast<size_t>(step.num_seqs) * sizeof(Sorted)));
    sort();
    pass_ = Pass::Weigh;
    cut();
    item_cost_ = cost_ * shape.num_kv_heads / kMinItems;
    pass_ = Pass::Count;
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
  ~Planner() { ::operator delete(seqs_sorted_); }
  Planner(const Planner&) = delete;
  Planner& operator=(const Planner&) = delete;

  size_t bytes() const { return bytes_; }

  int64_t write(uint8_t* scratch) {
    *reinterpret_cast<PlanHeader*>(scratch) = header_;
    seqs_ = reinterpret_cast<int32_t*>(scratch + header_.seqs);
    partials_ = reinterpret_cast<int64_t*>(scratch + header_.partials);
    tile_rows_ = reinterpret_cast<int32_t*>(scratch + header_.tile_rows);
    items_ = reinterpret_cast<Item*>(scratch + header_.items);
    pass_ = Pass::Write;
    cut();
    return num_items_;
  }

 private:
  enum class Pass { Weigh, Count, Write };

  struct Sorted {
    int32_t seq;
    int32_t num_shareable;  // leading splits that all rows of the sequence attend to whole; 0 where sharing would not pay
    int32_t num_common;     // leading splits that the sequence before it in this order has too
  };

  const int32_t* table(int64_t seq) const { return step_.block_table + seq * step_.max_blocks; }
  int64_t rows_begin(int64_t seq) const { return step_.row_starts[seq]; }
  int64_t rows_end(int64_t seq) const { return step_.row_starts[seq + 1]; }
  int64_t split_cost(int64_t num_rows) const { return num_rows * heads_per_row_ + kSplitCost; }

  // Order sequences by the block ids of their shareable splits, so that those which share a prefix are neighbours.
  void sort() {
    const auto common = [this](const Sorted& a, const Sorted& b) {
      const int32_t most = a.num_shareable < b.num_shareable ? a.num_shareable : b.num_shareable;
      int32_t n = 0;
      while (n < most && !compare_split(a.seq, b.seq, n)) ++n;
      return n;
    };
    for (int64_t s = 0; s < step_.num_seqs; ++s) {
      const int64_t num_rows = rows_end(s) - rows_begin(s);
      // A tile's worth of rows already shares what it reads; and a window seldom holds a whole split.
      const bool shareable = shape_.window == 0 && num_rows > 0 && num_rows < rows_per_tile_;
      const int64_t first = shareable ? step_.positions[rows_begin(s)] : -1;
      const Sorted next{static_cast<int32_t>(s), static_cast<int32_t>((first + 1) / kSplit), 0};
      int64_t lo = 0, hi = s;
      while (lo < hi) {
        const int64_t middle = (lo + hi) / 2;
        const Sorted& other = seqs_sorted_[middle];
        const int32_t same = common(other, next);
        const bool before = same < other.num_shareable && same < next.num_shareable
                                ? compare_split(other.seq, next.seq, same) < 0
                                : other.num_shareable <= next.num_shareable;
        if (before) lo = middle + 1;
        else hi = middle;
      }
      std::memmove(seqs_sorted_ + lo + 1, seqs_sorted_ + lo, static_cast<size_t>(s - lo) * sizeof(Sorted));
      seqs_sorted_[lo] = next;
    }
    for (int64_t i = 1; i < step_.num_seqs; ++i) seqs_sorted_[i].num_common = common(seqs_sorted_[i - 1], seqs_sorted_[i]);
  }

  int compare_split(int64_t a, int64_t b, int64_t split) const {
    return std::memcmp(table(a) + split * kSplitBlocks, table(b) + split * kSplitBlocks, kSplitBlocks * sizeof(int32_t));
  }

  void cut() {
    cost_ = num_items_ = num_tile_rows_ = num_partials_ = 0;
    for (int64_t i = 0; i < step_.num_seqs; ++i) {
      const int64_t seq = seqs_sorted_[i].seq;
      const bool shares = seqs_sorted_[i].num_common > 0 || (i + 1 < step_.num_seqs && seqs_sorted_[i + 1].num_common > 0);
      for (int64_t r = rows_begin(seq); r < rows_end(seq); ++r) {
        if (pass_ == Pass::Write) seqs_[r] = static_cast<int32_t>(seq), partials_[r] = -1;
        if (shares) keep_records(r);
      }
    }
    if (step_.num_seqs > 0) cut_group(0, step_.num_seqs, 0);
  }

  // Sequences [begin, end) of the order, whose first `split` splits are done with.
  void cut_group(int64_t begin, int64_t end, int64_t split) {
    if (end - begin == 1) {
      cut_alone(seqs_sorted_[begin].seq, split);
      return;
    }
    int64_t common = kMaxSplits;
    for (int64_t i = begin + 1; i < end; ++i)
      if (seqs_sorted_[i].num_common < common) common = seqs_sorted_[i].num_common;
    if (common > split) cut_together(begin, end, split, common);
    for (int64_t b = begin, e; b < end; b = e) {
      for (e = b + 1; e < end && seqs_sorted_[e].num_common > common;) ++e;
      cut_group(b, e, common);
    }
  }

  // Splits [split_begin, split_end) of all rows of sequences [begin, end) of the order.
  void cut_together(int64_t begin, int64_t end, int64_t split_begin, int64_t split_end) {
    int64_t left = 0;
    for (int64_t i = begin; i < end; ++i) left += rows_end(seqs_sorted_[i].seq) - rows_begin(seqs_sorted_[i].seq);
    int64_t num_tiles = (left + rows_per_tile_ - 1) / rows_per_tile_, room = (left + num_tiles - 1) / num_tiles;
    for (int64_t i = begin; i < end; ++i)
      for (int64_t r = rows_begin(seqs_sorted_[i].seq); r < rows_end(seqs_sorted_[i].seq); ++r) {
        add_row(r);
        if (--room) continue;
        const int64_t num_rows = (left + num_tiles - 1) / num_tiles;
        cut_tile(num_rows, split_begin, split_end, false);
        left -= num_rows, --num_tiles;
        if (num_tiles) room = (left + num_tiles - 1) / num_tiles;
      }
  }

  // Splits [split_begin, ...) of one sequence, its last tile first: in a prefill that is the longest.
  void cut_alone(int64_t seq, int64_t split_begin) {
    const int64_t first = rows_begin(seq), num_rows = rows_end(seq) - first;
    for (int64_t tile = (num_rows + rows_per_tile_ - 1) / rows_per_tile_ - 1; tile >= 0; --tile) {
      const int64_t begin = first + tile * rows_per_tile_;
      const int64_t end = begin + rows_per_tile_ < rows_end(seq) ? begin + rows_per_tile_ : rows_end(seq);
      const int64_t seen = first_split(shape_, step_.positions[begin]), last = end_split(step_.positions[end - 1]);
      for (int64_t r = begin; r < end; ++r) add_row(r);
      const int64_t num_runs = cut_tile(end - begin, seen > split_begin ? seen : split_begin, last, split_begin == 0);
      if (split_begin == 0 && num_runs > 1)
        for (int64_t r = begin; r < end; ++r) keep_records(r);
    }
  }

  void add_row(int64_t row) {
    if (pass_ == Pass::Write) tile_rows_[num_tile_rows_] = static_cast<int32_t>(row);
    ++num_tile_rows_;
  }

  void keep_records(int64_t row) {
    if (pass_ == Pass::Write) partials_[row] = num_partials_;
    num_partials_ += end_split(step_.positions[row]) - first_split(shape_, step_.positions[row]);
  }

  // Items of splits [begin, end) of the last `num_rows` rows added; `alone`: these are all the splits that the rows have.
  // Returns how many runs the splits are cut into.
  int64_t cut_tile(int64_t num_rows, int64_t begin, int64_t end, bool alone) {
    const int64_t count = end - begin;
    cost_ += count * split_cost(num_rows);
    if (pass_ == Pass::Weigh || count <= 0) return 0;
    const int64_t fit = item_cost_ / split_cost(num_rows);
    const int64_t num_runs = fit > 0 ? (count + fit - 1) / fit : count;
    const int64_t tile_begin = num_tile_rows_ - num_rows;
    if (pass_ == Pass::Write) {
      Item* item = items_ + num_items_;  // heads of one run after the other, as they lie in memory
      for (int64_t run = 0; run < num_runs; ++run)
        for (int64_t h = 0; h < shape_.num_kv_heads; ++h)
          *item++ = {static_cast<int32_t>(tile_begin), static_cast<int32_t>(num_rows), static_cast<int32_t>(h),
                     static_cast<int32_t>(begin + count * run / num_runs),
                     static_cast<int32_t>(begin + count * (run + 1) / num_runs), alone && num_runs == 1};
    }
    num_items_ += num_runs * shape_.num_kv_heads;
    return num_runs;
  }

  static constexpr int64_t kMaxSplits = INT32_MAX;
  const AttendShape& shape_;
  const AttendStep& step_;
  Sorted* seqs_sorted_;
  Pass pass_;
  int64_t heads_per_row_, rows_per_tile_, item_cost_ = 0;
  int64_t cost_ = 0, num_items_ = 0, num_tile_rows_ = 0, num_partials_ = 0;
  size_t bytes_ = 0;
  PlanHeader header_{};
  int32_t* seqs_ = nullptr;
  int64_t* partials_ = nullptr;
  int32_t* tile_rows_ = nullptr;
  Item* items_ = nullptr;
};

}  // namespace
}  // namespace spolia::SPOLIA_LEVEL
