// The extension module `spolia.kernels.cpu._cpu`.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "isa.h"

namespace nb = nanobind;

void bind_executable(nb::module_& m);
void bind_rowwise(nb::module_& m);
void bind_linear(nb::module_& m);
void bind_attend(nb::module_& m);
void bind_machine(nb::module_& m);

NB_MODULE(_cpu, m) {
  nb::set_leak_warnings(false);  // an executable that lives until the process ends is no leak
  m.def("levels", [] {
    std::vector<std::string> names;
    for (const spolia::Kernels& level : spolia::levels()) names.push_back(level.name);
    return names;
  }, "Names of the ISA levels that this CPU has, best first.");
  m.def("level", [](const std::string& name) { return std::string(spolia::kernels(name).name); }, nb::arg("name") = "",
        "The level that is used for `name`; '' is the one that SPOLIA_ISA names, else the best.");
  bind_executable(m);
  bind_rowwise(m);
  bind_linear(m);
  bind_attend(m);
  bind_machine(m);
}
