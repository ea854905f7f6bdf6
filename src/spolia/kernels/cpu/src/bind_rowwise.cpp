// Raw entry points of rowwise.h for tests: addresses of float32 buffers as integers, one level by name.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "isa.h"

namespace nb = nanobind;
using spolia::Act;

static float* f32(uintptr_t address) { return reinterpret_cast<float*>(address); }
static const spolia::RowwiseKernels& at(const std::string& level) { return spolia::kernels(level).rowwise; }

void bind_rowwise(nb::module_& m) {
  using A = uintptr_t;
  using L = const std::string&;
  m.def("raw_rms_norm", [](L level, A x, A weight, int64_t width, int64_t group, float eps, A out) {
    at(level).rms_norm(f32(x), f32(weight), width, group, eps, f32(out));
  });
  m.def("raw_layer_norm", [](L level, A x, A weight, A bias, int64_t width, float eps, A out) {
    at(level).layer_norm(f32(x), f32(weight), f32(bias), width, eps, f32(out));
  });
  m.def("raw_rope", [](L level, A x, A cos, A sin, int64_t half, int64_t head_dim, int64_t width, A out) {
    at(level).rope(f32(x), f32(cos), f32(sin), half, head_dim, width, f32(out));
  });
  m.def("raw_glu", [](L level, A gate, A up, int64_t width, int32_t act, A out) {
    at(level).glu(f32(gate), f32(up), width, Act(act), f32(out));
  });
  m.def("raw_activation", [](L level, A x, int64_t width, int32_t act, A out) {
    at(level).activation(f32(x), width, Act(act), f32(out));
  });
  m.def("raw_add", [](L level, A a, A b, int64_t width, A out) { at(level).add(f32(a), f32(b), width, f32(out)); });
  m.def("raw_scale", [](L level, A x, float factor, int64_t width, A out) {
    at(level).scale(f32(x), factor, width, f32(out));
  });
  m.def("raw_softcap", [](L level, A x, int64_t width, float scale, float cap) {
    at(level).softcap(f32(x), width, scale, cap);
  });
}
