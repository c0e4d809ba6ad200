// Kernels on the device's current stream, over memory given by address: how tests/gpu checks and
// times them where they run.
#include <pybind11/stl.h>

#include "base/check.h"
#include "base/device_runtime.h"
#include "bindings.h"
#include "bucket/device_pack.h"
#include "collective/device_kernels/copy_many.h"
#include "collective/device_kernels/reduce_segments.h"

namespace py = pybind11;

namespace pydist {

namespace {

template <class T>
T* at_address(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

DeviceRuntime& device() {
  PYDIST_CHECK(device_runtime() != nullptr, UsageError, "there is no device");
  return *device_runtime();
}

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
  arguments.inputs = at_address<const void>(inputs);
  arguments.stride_nbytes = stride_nbytes;
  arguments.num_inputs = num_inputs;
  arguments.own_input = at_address<const void>(own_input);
  arguments.own = own;
  arguments.output = at_address<void>(output);
  arguments.num_elements = num_elements;
  arguments.scale = scale;
  reduce_segments(element(from), element(to), arguments, device().current_stream());
}

DType dtype(const std::string& name) {
  for (int d = 0; d < kNumDTypes; ++d) {
    if (name == dtype_name(static_cast<DType>(d))) return static_cast<DType>(d);
  }
  throw UsageError(name + " is no type of the engine");
}

// A pack with the items that it is run with.
class LaunchedPack {
 public:
  using Item = std::tuple<uintptr_t, std::string, uintptr_t, std::string, int64_t>;

  explicit LaunchedPack(const std::vector<Item>& items) {
    for (const auto& [source, from, target, to, num_elements] : items) {
      items_.push_back({at_address<const void>(source), dtype(from), at_address<void>(target),
                        dtype(to), num_elements});
    }
  }

  // `partials`, of num_copy_partials() floats, and `sum_of_squares` belong together.
  void run(double scale, uintptr_t found_nonfinite, uintptr_t partials, uintptr_t sum_of_squares) {
    DevicePackOptions options;
    options.scale = scale;
    options.found_nonfinite = at_address<float>(found_nonfinite);
    options.partials = at_address<float>(partials);
    const Stream stream = device().current_stream();
    pack_.run(items_, options, stream);
    if (partials == 0) return;
    SumPartialsArguments arguments;
    arguments.partials = at_address<float>(partials);
    arguments.sum = at_address<float>(sum_of_squares);
    arguments.num_partials = num_copy_partials();
    device().launch(kSumPartials, &arguments, 1, stream);
  }

  int64_t num_refreshes() const { return pack_.num_refreshes(); }

 private:
  std::vector<PackItem> items_;
  DevicePack pack_;
};

}  // namespace

void bind_testing_launch(py::module_& testing) {
  testing.def("launch_reduce_segments", &launch_reduce_segments, py::arg("from_type"),
              py::arg("to_type"), py::arg("inputs"), py::arg("stride_nbytes"),
              py::arg("num_inputs"), py::arg("own_input"), py::arg("own"), py::arg("output"),
              py::arg("num_elements"), py::arg("scale"),
              "reduce_segments() on the current stream; an input that is none of `own` lies at "
              "`inputs` + its index * `stride_nbytes`.");
  testing.def("num_copy_partials", &num_copy_partials,
              "Partial sums of squares that a pack leaves.");
  py::class_<LaunchedPack>(testing, "LaunchedPack", "Copies that one launch does.")
      .def(py::init<const std::vector<LaunchedPack::Item>&>(), py::arg("items"),
           "(source, its type, target, its type, number of elements) each, memory by address.")
      .def("run", &LaunchedPack::run, py::arg("scale") = 1.0, py::arg("found_nonfinite") = 0,
           py::arg("partials") = 0, py::arg("sum_of_squares") = 0,
           py::call_guard<py::gil_scoped_release>(), "On the current stream.")
      .def_property_readonly("num_refreshes", &LaunchedPack::num_refreshes);
}

}  // namespace pydist
