// `_cpu.Executable`: the dataclasses of lowering.py and the arrays of a step, read into plan.h's and executable.h's structs.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "executable.h"

namespace nb = nanobind;
using namespace spolia;

namespace {

template <class T>
T get(nb::handle object, const char* name) {
  return nb::cast<T>(object.attr(name));
}

template <class T>
T named(const std::string& name, std::initializer_list<std::pair<const char*, T>> values) {
  for (const auto& [key, value] : values)
    if (name == key) return value;
  throw std::invalid_argument("no such kind: " + name);
}

// The data of a C-contiguous array of that type and shape (-1: any), which must outlive its use.
template <class T>
T* data(nb::handle array, const std::string& name, std::initializer_list<int64_t> shape, int64_t* sizes = nullptr) {
  using Element = std::remove_const_t<T>;
  using Array = std::conditional_t<std::is_const_v<T>, nb::ndarray<nb::ro, nb::device::cpu>, nb::ndarray<nb::device::cpu>>;
  Array view;
  if (!nb::try_cast<Array>(array, view, false)) throw std::invalid_argument(name + ": not a writable numpy array");
  if (view.dtype() != nb::dtype<Element>()) throw std::invalid_argument(name + ": wrong dtype");
  std::string wanted, found;
  bool fits = view.ndim() == shape.size();
  for (size_t i = 0; i < view.ndim(); ++i) found += (i ? ", " : "") + std::to_string(view.shape(i));
  int64_t i = 0, contiguous = 1;
  for (int64_t size : shape) {
    wanted += (i ? ", " : "") + (size < 0 ? std::string("any") : std::to_string(size));
    if (fits && size >= 0 && int64_t(view.shape(i)) != size) fits = false;
    if (fits && sizes) sizes[i] = int64_t(view.shape(i));
    ++i;
  }
  if (!fits) throw std::invalid_argument(name + ": shape [" + found + "], expected [" + wanted + "]");
  for (i = int64_t(view.ndim()) - 1; i >= 0; --i) {
    if (view.size() > 0 && view.shape(i) > 1 && view.stride(i) != contiguous) throw std::invalid_argument(name + ": not C-contiguous");
    contiguous *= int64_t(view.shape(i));
  }
  return static_cast<T*>(view.data());
}

template <class T, class F>
std::vector<T> each(nb::handle items, F convert) {
  std::vector<T> result;
  for (nb::handle item : items) result.push_back(convert(item));
  return result;
}

Matrix to_matrix(nb::handle weight, nb::handle types) {
  int64_t shape[2], bytes[2];
  nb::tuple dims = nb::cast<nb::tuple>(weight.attr("shape"));
  const std::string name = get<std::string>(weight, "name");
  if (dims.size() != 2) throw std::invalid_argument(name + ": a matrix has two dimensions");
  for (int i = 0; i < 2; ++i) shape[i] = nb::cast<int64_t>(dims[i]);
  const auto* bytes_of = data<const uint8_t>(weight.attr("data"), name, {shape[0], -1}, bytes);
  const int type = get<int>(types[weight.attr("type")], "ggml_id");
  return {name, WeightType(type), bytes_of, size_t(bytes[1]), shape[0], shape[1]};
}

Act to_act(nb::handle op) {
  return named<Act>(get<std::string>(op, "act"), {{"silu", Act::Silu}, {"gelu_tanh", Act::GeluTanh}, {"gelu", Act::Gelu}});
}

RowOp to_row_op(nb::handle op) {
  using K = RowOpKind;
  const K kind = named<K>(get<std::string>(op, "kind"),
                          {{"rope_table", K::RopeTable}, {"embed", K::Embed}, {"gather", K::Gather},
                           {"rms_norm", K::RmsNorm}, {"layer_norm", K::LayerNorm}, {"rope", K::Rope}, {"glu", K::Glu},
                           {"activation", K::Activation}, {"add", K::Add}, {"scale", K::Scale}, {"prepare", K::Prepare}});
  return {kind, get<int>(op, "out"), get<int>(op, "a"), get<int>(op, "b"), get<int64_t>(op, "width"),
          get<int>(op, "weight"), get<int>(op, "bias"), get<int>(op, "index"), get<int64_t>(op, "group"),
          get<int64_t>(op, "half"), get<float>(op, "factor"), to_act(op), RowKind(get<int>(op, "row_kind"))};
}

Stage to_stage(nb::handle stage) {
  return {Domain(get<int>(stage, "domain")), get<std::vector<int>>(stage, "merges"),
          each<RowOp>(stage.attr("row_ops"), to_row_op), each<std::pair<int, int>>(stage.attr("keeps"), [](nb::handle k) { return nb::cast<std::pair<int, int>>(k); }),
          get<std::vector<int>>(stage, "stores"),
          each<Matmul>(stage.attr("matmuls"),
                       [](nb::handle m) {
                         return Matmul{get<int>(m, "matrix"), get<int>(m, "rows"), RowKind(get<int>(m, "row_kind")), get<int>(m, "out"),
                                       get<int>(m, "bias"), get<int>(m, "residual"), get<float>(m, "scale"), get<float>(m, "softcap"),
                                       get<int>(m, "gate"), get<int>(m, "gate_bias"), to_act(m)};
                       }),
          get<std::vector<int>>(stage, "attends")};
}

KvType to_kv_type(const std::string& name) {
  return named<KvType>(name, {{"f32", KvType::F32}, {"f16", KvType::F16}, {"bf16", KvType::BF16}, {"int8", KvType::INT8}});
}

Plan to_plan(nb::handle plan) {
  Plan result;
  const nb::object types = nb::module_::import_("spolia.kernels.quants").attr("TYPES");
  const KvType kv_type = to_kv_type(get<std::string>(plan, "kv_dtype"));
  result.buffers = each<Buffer>(plan.attr("buffers"), [](nb::handle b) {
    return Buffer{Domain(get<int>(b, "domain")), get<size_t>(b, "offset"), get<size_t>(b, "row_bytes")};
  });
  int domain = 0;
  for (nb::handle bytes : plan.attr("arena_row_bytes")) result.arena_row_bytes[domain++] = nb::cast<size_t>(bytes);
  result.vectors = each<std::vector<float>>(plan.attr("vectors"), [](nb::handle v) {
    int64_t size;
    const float* values = data<const float>(v, "vector", {-1}, &size);
    return std::vector<float>(values, values + size);
  });
  auto matrix = [&](nb::handle weight) { return to_matrix(weight, types); };
  result.matrices = each<Matrix>(plan.attr("matrices"), matrix);
  result.tables = each<Matrix>(plan.attr("tables"), matrix);
  result.ropes = each<Rope>(plan.attr("ropes"), [](nb::handle r) {
    return Rope{get<std::vector<float>>(r, "inv_freq"), get<float>(r, "scale")};
  });
  result.layers = each<AttendLayer>(plan.attr("layers"), [&](nb::handle l) {
    const AttendShape shape{kv_type, get<int64_t>(l, "num_heads"), get<int64_t>(l, "num_kv_heads"), get<int64_t>(l, "head_dim"),
                            get<int64_t>(l, "window"), get<float>(l, "scale"), get<float>(l, "softcap")};
    return AttendLayer{get<int>(l, "q"), get<int>(l, "k"), get<int>(l, "v"), get<int>(l, "out"), get<int>(l, "group"), shape};
  });
  result.groups = get<std::vector<std::vector<int>>>(plan, "groups");
  result.stages = each<Stage>(plan.attr("stages"), to_stage);
  result.hidden = get<int>(plan, "hidden");
  result.hidden_size = get<int64_t>(plan, "hidden_size");
  result.num_layers = get<int64_t>(plan, "num_layers");
  return result;
}

Step to_step(nb::handle inputs, nb::handle logits, nb::handle hidden, nb::handle layers, const Executable& executable) {
  Step step{};
  int64_t num_starts;
  step.token_ids = data<const int32_t>(inputs.attr("token_ids"), "token_ids", {-1}, &step.num_rows);
  step.positions = data<const int32_t>(inputs.attr("positions"), "positions", {step.num_rows});
  step.row_starts = data<const int32_t>(inputs.attr("row_starts"), "row_starts", {-1}, &num_starts);
  if (num_starts == 0) throw std::invalid_argument("row_starts: empty, expected at least [0]");
  step.num_seqs = num_starts - 1;
  step.logit_rows = data<const int32_t>(inputs.attr("logit_rows"), "logit_rows", {-1}, &step.num_logit_rows);
  if (!logits.is_none()) step.logits = data<float>(logits, "logits", {step.num_logit_rows, executable.vocab_size()});
  if (!hidden.is_none()) step.hidden = data<float>(hidden, "hidden", {step.num_logit_rows, executable.hidden_size()});
  if (!layers.is_none())
    step.layers = data<float>(layers, "layers", {executable.num_layers(), step.num_logit_rows, executable.hidden_size()});
  for (nb::handle table : inputs.attr("block_tables")) {
    int64_t sizes[2];
    const int32_t* ids = data<const int32_t>(table, "block_tables", {step.num_seqs, -1}, sizes);
    step.block_tables.push_back({ids, sizes[1]});
  }
  for (nb::handle copy : inputs.attr("copies"))
    step.copies.push_back({get<int>(copy, "group"), get<int64_t>(copy, "src"), get<int64_t>(copy, "dst"), get<int64_t>(copy, "num_tokens")});
  return step;
}

}  // namespace

void bind_executable(nb::module_& m) {
  m.def("row_format", [](const std::string& level, int weight_type, int64_t k, bool precise) {
    const LinearKernels& linear = kernels(level).linear;
    RowKind kind = linear.row_kind(WeightType(weight_type));
    if (precise && kind == RowKind::Q8) kind = RowKind::Q16;
    return std::pair(int(kind), linear.row_bytes(kind, k));
  });
  nb::class_<Executable>(m, "Executable")
      .def("__init__",
           [](Executable* self, nb::handle plan, const std::string& level, int64_t vocab_size, int num_threads) {
             Plan converted = to_plan(plan);
             const nb::gil_scoped_release release;
             new (self) Executable(std::move(converted), kernels(level), vocab_size, num_threads);
           })
      .def_prop_ro("level", [](const Executable& self) { return std::string(self.kernels().name); })
      .def_prop_ro("num_threads", &Executable::num_threads)
      .def_prop_ro("packed_bytes", &Executable::packed_bytes)
      .def_rw("profiling", &Executable::profiling)
      .def("set_num_threads", &Executable::set_num_threads)
      .def("set_kv_dtype", [](Executable& self, const std::string& kv_dtype) { self.set_kv_type(to_kv_type(kv_dtype)); })
      .def("block_bytes",
           [](const Executable& self, int group) {
             if (group < 0 || group >= self.num_groups())
               throw std::invalid_argument("group " + std::to_string(group) + " of " + std::to_string(self.num_groups()));
             return self.block_bytes(group);
           })
      .def("bind_kv",
           [](Executable& self, nb::handle pools) {
             std::vector<Pool> converted;
             for (nb::handle pool : pools) {
               if (int(converted.size()) >= self.num_groups()) throw std::invalid_argument("more pools than cache groups");
               int64_t sizes[2];
               const std::string name = "pools[" + std::to_string(converted.size()) + "]";
               auto* bytes = data<uint8_t>(pool, name, {-1, int64_t(self.block_bytes(int(converted.size())))}, sizes);
               if (reinterpret_cast<uintptr_t>(bytes) % 64) throw std::invalid_argument(name + ": not 64-byte aligned");
               converted.push_back({bytes, sizes[0]});
             }
             if (int(converted.size()) < self.num_groups()) throw std::invalid_argument("fewer pools than cache groups");
             self.bind_kv(std::move(converted));
           })
      .def("run",
           [](Executable& self, nb::handle inputs, nb::handle logits, nb::handle hidden, nb::handle layers) {
             const Step step = to_step(inputs, logits, hidden, layers, self);
             self.check(step);
             const nb::gil_scoped_release release;
             self.run(step);
           },
           nb::arg("step"), nb::arg("logits").none(), nb::arg("hidden") = nb::none(), nb::arg("layers") = nb::none())
      .def("head",
           [](Executable& self, nb::handle hidden, nb::handle logits) {
             int64_t sizes[2];
             const float* rows = data<const float>(hidden, "hidden", {-1, self.hidden_size()}, sizes);
             float* out = data<float>(logits, "logits", {sizes[0], self.vocab_size()});
             const nb::gil_scoped_release release;
             self.head(rows, sizes[0], out);
           })
      .def("argmax",
           [](Executable& self, nb::handle rows, nb::handle best) {
             int64_t sizes[2];
             const float* values = data<const float>(rows, "rows", {-1, -1}, sizes);
             auto* found = data<int64_t>(best, "best", {sizes[0]});
             if (sizes[1] == 0) throw std::invalid_argument("rows: no columns");
             const nb::gil_scoped_release release;
             self.argmax(values, sizes[0], sizes[1], found);
           })
      .def("take_profile", &Executable::take_profile);
}
