// Raw entry points of linear.h for tests and benchmarks, one level by name, one weight type by its GGML id.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <stdexcept>

#include "isa.h"
#include "threads.h"

namespace nb = nanobind;
using namespace spolia;

namespace {

template <class T, int Dims>
using Array = nb::ndarray<T, nb::ndim<Dims>, nb::c_contig, nb::device::cpu>;

const LinearKernels& at(const std::string& level) { return spolia::kernels(level).linear; }

void require(bool fits) {
  if (!fits) throw std::invalid_argument("linear: sizes do not fit each other");
}

// In the float mode of the executable's threads, which flushes subnormal numbers.
template <class Job>
void as_in_a_step(Job job) {
  auto on_thread = [&](int) { job(); };
  Threads(1).run(on_thread);
}

void pack(const std::string& level, int32_t type, Array<const uint8_t, 2> rows, int64_t k, int64_t tile_begin, int64_t tile_end, Array<uint8_t, 1> packed) {
  const auto n = static_cast<int64_t>(rows.shape(0));
  require(packed.size() >= at(level).packed_bytes(WeightType(type), n, k));
  at(level).pack(WeightType(type), rows.data(), rows.shape(1), n, k, tile_begin, tile_end, packed.data());
}

RowKind kind_of(const std::string& level, int32_t type, bool precise) {
  const RowKind kind = at(level).row_kind(WeightType(type));
  return precise && kind == RowKind::Q8 ? RowKind::Q16 : kind;
}

void prepare(const std::string& level, int32_t type, bool precise, Array<const float, 2> x, Array<uint8_t, 2> prepared) {
  const LinearKernels& kernels = at(level);
  const RowKind kind = kind_of(level, type, precise);
  const auto k = static_cast<int64_t>(x.shape(1));
  require(prepared.shape(0) == x.shape(0) && prepared.shape(1) == kernels.row_bytes(kind, k));
  as_in_a_step([&] {
    for (size_t r = 0; r < x.shape(0); ++r) kernels.prepare_row(kind, x.data() + r * x.shape(1), k, prepared.data() + r * prepared.shape(1));
  });
}

void run(const std::string& level, int32_t type, bool precise, int64_t k, Array<const uint8_t, 1> packed, Array<const uint8_t, 2> prepared, Array<float, 2> out,
         std::optional<Array<const float, 1>> bias, std::optional<Array<const float, 2>> residual, int64_t tile_begin, int64_t tile_end) {
  const LinearKernels& kernels = at(level);
  const auto n = static_cast<int64_t>(out.shape(1));
  require(packed.size() >= kernels.packed_bytes(WeightType(type), n, k) && prepared.shape(0) == out.shape(0));
  const RowKind kind = kind_of(level, type, precise);
  require(prepared.shape(1) == kernels.row_bytes(kind, k));
  require((!bias || int64_t(bias->shape(0)) == n) && (!residual || (residual->shape(0) == out.shape(0) && int64_t(residual->shape(1)) == n)));
  const Packed weights{WeightType(type), n, k, packed.data()};
  const Epilogue epilogue{bias ? bias->data() : nullptr, residual ? residual->data() : nullptr, n};
  nb::gil_scoped_release unlocked;
  as_in_a_step([&] { kernels.run(weights, kind, prepared.data(), static_cast<int64_t>(out.shape(0)), out.data(), n, epilogue, tile_begin, tile_end); });
}

}  // namespace

void bind_linear(nb::module_& m) {
  m.def("raw_linear_packed_bytes", [](const std::string& level, int32_t type, int64_t n, int64_t k) {
    return at(level).packed_bytes(WeightType(type), n, k);
  });
  m.def("raw_linear_row_bytes", [](const std::string& level, int32_t type, bool precise, int64_t k) {
    return at(level).row_bytes(kind_of(level, type, precise), k);
  });
  m.def("raw_linear_pack", &pack);
  m.def("raw_linear_prepare", &prepare);
  m.def("raw_linear", &run, nb::arg("level"), nb::arg("type"), nb::arg("precise"), nb::arg("k"), nb::arg("packed"), nb::arg("prepared"), nb::arg("out"),
        nb::arg("bias").none(), nb::arg("residual").none(), nb::arg("tile_begin"), nb::arg("tile_end"));
  m.def("raw_dequantize_row", [](const std::string& level, int32_t type, Array<const uint8_t, 1> row, float scale, Array<float, 1> out) {
    as_in_a_step([&] { at(level).dequantize_row(WeightType(type), row.data(), static_cast<int64_t>(out.shape(0)), scale, out.data()); });
  });
}
