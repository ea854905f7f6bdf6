// Raw entry points of attend.h for tests and benchmarks, one level by name.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <memory>
#include <new>
#include <numeric>
#include <random>
#include <stdexcept>

#include "isa.h"
#include "threads.h"

namespace nb = nanobind;
using namespace spolia;

namespace {

template <class T, int Dims>
using Array = nb::ndarray<T, nb::ndim<Dims>, nb::c_contig, nb::device::cpu>;

struct FreeAligned {
  void operator()(uint8_t* p) const { operator delete[](p, std::align_val_t(64)); }
};
using Scratch = std::unique_ptr<uint8_t[], FreeAligned>;

// Filled with NaNs: kernels must not rely on what scratch holds.
Scratch make_scratch(size_t bytes) {
  Scratch scratch(static_cast<uint8_t*>(operator new[](bytes + 64, std::align_val_t(64))));
  std::fill_n(scratch.get(), bytes, uint8_t(0xff));
  return scratch;
}

// One step of attention for each layer offset in turn, all with the same q, k, v and out; returns the number of items of a layer.
// Items run in an order shuffled by `seed`; 0 keeps the plan's order. In the float mode of the executable's threads.
int64_t attend(const std::string& level, const AttendShape& shape, Array<uint8_t, 2> pool,
               const std::vector<size_t>& layer_offsets, Array<const int32_t, 2> block_table,
               Array<const int32_t, 1> row_starts, Array<const int32_t, 1> positions, Array<const float, 2> q,
               Array<const float, 2> k, Array<const float, 2> v, Array<float, 2> out, int num_threads, unsigned seed) {
  const AttendKernels& kernels = spolia::kernels(level).attend;
  const auto num_rows = static_cast<int64_t>(positions.shape(0));
  if (block_table.shape(0) + 1 != row_starts.shape(0) || q.shape(0) != positions.shape(0) ||
      k.shape(0) != positions.shape(0) || v.shape(0) != positions.shape(0) || out.shape(0) != positions.shape(0) ||
      q.shape(1) != size_t(shape.num_heads * shape.head_dim) || out.shape(1) != q.shape(1) ||
      k.shape(1) != size_t(shape.num_kv_heads * shape.head_dim) || v.shape(1) != k.shape(1))
    throw std::invalid_argument("attend: shapes do not fit each other");
  AttendStep step{};
  step.pool = pool.data();
  step.block_bytes = pool.shape(1);
  step.block_table = block_table.data();
  step.max_blocks = static_cast<int64_t>(block_table.shape(1));
  step.row_starts = row_starts.data();
  step.positions = positions.data();
  step.num_seqs = static_cast<int64_t>(block_table.shape(0));
  step.q = q.data(), step.ld_q = static_cast<int64_t>(q.shape(1));
  step.k = k.data(), step.ld_k = static_cast<int64_t>(k.shape(1));
  step.v = v.data(), step.ld_v = static_cast<int64_t>(v.shape(1));
  step.out = out.data(), step.ld_out = static_cast<int64_t>(out.shape(1));

  nb::gil_scoped_release unlocked;
  const Scratch shared = make_scratch(kernels.shared_scratch_bytes(shape, step));
  std::vector<int64_t> order;
  std::vector<std::atomic<int64_t>> next(layer_offsets.size());
  std::barrier<> barrier(num_threads);
  auto work = [&](int thread) {
    const Scratch scratch = make_scratch(kernels.thread_scratch_bytes(shape));
    const int64_t begin = num_rows * thread / num_threads, end = num_rows * (thread + 1) / num_threads;
    AttendStep mine = step;
    for (size_t layer = 0; layer < layer_offsets.size(); ++layer) {
      mine.layer_offset = layer_offsets[layer];
      kernels.store(shape, mine, begin, end);
      if (thread == 0) {
        order.resize(static_cast<size_t>(kernels.plan(shape, mine, shared.get())));
        std::iota(order.begin(), order.end(), 0);
        if (seed) std::shuffle(order.begin(), order.end(), std::mt19937(seed));
      }
      barrier.arrive_and_wait();
      const auto num_items = static_cast<int64_t>(order.size());
      for (int64_t i; (i = next[layer].fetch_add(1, std::memory_order_relaxed)) < num_items;)
        kernels.item(shape, mine, order[static_cast<size_t>(i)], shared.get(), scratch.get());
      barrier.arrive_and_wait();
      kernels.merge(shape, mine, begin, end, shared.get());
      barrier.arrive_and_wait();
    }
  };
  Threads(num_threads).run_on_all(work);
  return static_cast<int64_t>(order.size());
}

}  // namespace

void bind_attend(nb::module_& m) {
  nb::class_<AttendShape>(m, "AttendShape", "One attention layer: attend.h. kv_type is 0 (f32), 1 (f16), 2 (bf16) or 3 (int8).")
      .def("__init__",
           [](AttendShape* self, int32_t kv_type, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, int64_t window,
              float scale, float softcap) {
             new (self) AttendShape{KvType(kv_type), num_heads, num_kv_heads, head_dim, window, scale, softcap};
           },
           nb::arg("kv_type"), nb::arg("num_heads"), nb::arg("num_kv_heads"), nb::arg("head_dim"), nb::arg("window"),
           nb::arg("scale"), nb::arg("softcap"));
  m.def("raw_attend_layer_bytes", [](const std::string& level, const AttendShape& shape) {
    return spolia::kernels(level).attend.layer_bytes(shape);
  });
  m.def("raw_attend", &attend, nb::arg("level"), nb::arg("shape"), nb::arg("pool"), nb::arg("layer_offsets"),
        nb::arg("block_table"), nb::arg("row_starts"), nb::arg("positions"), nb::arg("q"), nb::arg("k"), nb::arg("v"),
        nb::arg("out"), nb::arg("num_threads") = 1, nb::arg("seed") = 0);
  m.def("raw_attend_copy_tokens", [](const std::string& level, const AttendShape& shape, Array<uint8_t, 2> pool,
                                     size_t layer_offset, size_t src, size_t dst, int64_t num_tokens) {
    uint8_t* base = pool.data() + layer_offset;
    spolia::kernels(level).attend.copy_tokens(shape, base + src * pool.shape(1), base + dst * pool.shape(1), num_tokens);
  });
}
