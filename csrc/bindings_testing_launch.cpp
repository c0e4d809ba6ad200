// Kernels on the device's current stream, over memory given by address: how tests/gpu checks and
// times them where they run.
#include <pybind11/stl.h>

#include "base/check.h"
#include "base/device_runtime.h"
#include "bindings.h"
#include "collective/device_kernels/reduce_segments.h"

namespace py = pybind11;

namespace pydist {

namespace {

Element element(const std::string& name) {
  for (int e = 0; e < kNumElements; ++e) {
    if (name == element_name(static_cast<Element>(e))) return static_cast<Element>(e);
  }
  throw UsageError(name + " is no type that segments can have");
}

void launch_reduce_segments(const std::string& from, const std::string& to, uintptr_t inputs,
                            int64_t stride_nbytes, int num_inputs, uintptr_t own_input, int own,
                            uintptr_t output, int64_t num_elements, double scale) {
  ReduceSegmentsArguments arguments;
  arguments.inputs = reinterpret_cast<const void*>(inputs);
  arguments.stride_nbytes = stride_nbytes;
  arguments.num_inputs = num_inputs;
  arguments.own_input = reinterpret_cast<const void*>(own_input);
  arguments.own = own;
  arguments.output = reinterpret_cast<void*>(output);
  arguments.num_elements = num_elements;
  arguments.scale = scale;
  reduce_segments(element(from), element(to), arguments, device_runtime()->current_stream());
}

}  // namespace

void bind_testing_launch(py::module_& testing) {
  testing.def("launch_reduce_segments", &launch_reduce_segments, py::arg("from_type"),
              py::arg("to_type"), py::arg("inputs"), py::arg("stride_nbytes"),
              py::arg("num_inputs"), py::arg("own_input"), py::arg("own"), py::arg("output"),
              py::arg("num_elements"), py::arg("scale"),
              "reduce_segments() on the current stream; an input that is none of `own` lies at "
              "`inputs` + its index * `stride_nbytes`.");
}

}  // namespace pydist
