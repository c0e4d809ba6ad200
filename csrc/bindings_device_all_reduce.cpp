// The mean over a device's group as Python sees it, for tests and reports.
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>

#include "base/check.h"
#include "bindings.h"
#include "collective/device_all_reduce.h"

namespace py = pybind11;

namespace pydist {

namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

// In the order of the enums.
constexpr std::array<const char*, 4> kAlgorithmNames = {"auto", "nccl", "ring", "slices"};
constexpr std::array<const char*, 4> kWireNames = {"same", "float16", "bfloat16", "float8_e4m3fn"};

template <class Enum>
Enum value_of(const std::array<const char*, 4>& names, const std::string& name, const char* kind) {
  const auto* found = std::find(names.begin(), names.end(), name);
  PYDIST_CHECK(found != names.end(), UsageError, kind, " is one of \"", names[0], "\", \"",
               names[1], "\", \"", names[2], "\" and \"", names[3], "\", not \"", name, "\"");
  return static_cast<Enum>(found - names.begin());
}

WireType wire_of(const std::string& name) {
  return value_of<WireType>(kWireNames, name, "a wire type");
}

DType floating_type(at::ScalarType type) {
  switch (type) {
    case at::kHalf:
      return DType::kFloat16;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kFloat:
      return DType::kFloat32;
    case at::kDouble:
      return DType::kFloat64;
    default:
      throw UsageError(concat(c10::toString(type), " is not a real floating type"));
  }
}

std::unique_ptr<DeviceAllReduce> make(std::shared_ptr<NcclCommunicator> communicator,
                                      const std::string& algorithm) {
  return DeviceAllReduce::create(std::move(communicator),
                                 value_of<Algorithm>(kAlgorithmNames, algorithm, "an algorithm"));
}

void mean(DeviceAllReduce& self, const at::Tensor& tensor, const std::string& wire,
          const std::string& what, int divisor) {
  PYDIST_CHECK(tensor.is_contiguous(), UsageError, "expected a contiguous tensor");
  self.mean(tensor.mutable_data_ptr(), tensor.numel(), floating_type(tensor.scalar_type()),
            wire_of(wire), divisor, what);
}

std::string choose(const DeviceAllReduce& self, int64_t num_elements, at::ScalarType dtype,
                   const std::string& wire) {
  const Algorithm algorithm = self.choose(num_elements, floating_type(dtype), wire_of(wire));
  return kAlgorithmNames[static_cast<size_t>(algorithm)];
}

}  // namespace

void bind_device_all_reduce(py::module_& module) {
  py::class_<DeviceAllReduce>(
      module, "DeviceAllReduce",
      "Means over the ranks of a NcclCommunicator, on its stream, by \"nccl\", \"ring\", "
      "\"slices\" "
      "or what \"auto\" finds to be the fastest (then making one is collective).")
      .def(py::init(&make), py::arg("communicator"), py::arg("algorithm"), NoGil())
      .def("mean", &mean, py::arg("tensor"), py::arg("wire"), py::arg("what"),
           py::arg("divisor") = 0, NoGil(),
           "In place, of a contiguous tensor of the device. `wire`: \"same\", \"float16\", "
           "\"bfloat16\" or \"float8_e4m3fn\".")
      .def("choose", &choose, py::arg("num_elements"), py::arg("dtype"), py::arg("wire"),
           "The algorithm that mean() takes.");
}

}  // namespace pydist
