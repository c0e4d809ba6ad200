// A stage's backward as Python sees it, for tests only.
#include <torch/csrc/utils/pybind.h>

#include "bindings.h"
#include "pipeline/backward_cut.h"
#include "pipeline/received_edge.h"

namespace py = pybind11;

namespace pydist {

namespace {

// Python has None for what is an undefined tensor here.
using OptionalTensors = std::vector<std::optional<at::Tensor>>;

std::vector<at::Tensor> to_tensors(const OptionalTensors& given) {
  std::vector<at::Tensor> tensors;
  for (const auto& tensor : given) tensors.push_back(tensor.value_or(at::Tensor()));
  return tensors;
}

py::tuple receive(const at::Tensor& data) {
  at::Tensor received;
  ReceivedEdge edge(data, received);
  return py::make_tuple(std::move(received), std::move(edge));
}

}  // namespace

void bind_testing_cut(py::module_& testing) {
  py::class_<ReceivedEdge>(testing, "ReceivedEdge", "Where a received tensor's gradient arrives.")
      .def("take_gradient", &ReceivedEdge::take_gradient, "None if nothing arrived.");
  testing.def("receive", &receive, py::arg("data"), "(what a stage gets, its ReceivedEdge).");
  py::class_<StageBackward>(testing, "StageBackward", "B, or I and W, of one stage; see C++.")
      .def(py::init([](const OptionalTensors& outputs, const std::vector<ReceivedEdge>& inputs) {
             return StageBackward(to_tensors(outputs), inputs);
           }),
           py::arg("outputs"), py::arg("inputs"))
      .def(
          "backward",
          [](StageBackward& self, const OptionalTensors& root_gradients) {
            const std::vector<at::Tensor> gradients = to_tensors(root_gradients);
            const py::gil_scoped_release no_gil;
            self.backward(gradients);
          },
          py::arg("root_gradients"), "B.")
      .def(
          "input",
          [](StageBackward& self, const OptionalTensors& root_gradients, bool split_checkpointed) {
            const std::vector<at::Tensor> gradients = to_tensors(root_gradients);
            const py::gil_scoped_release no_gil;
            self.input(gradients, split_checkpointed);
          },
          py::arg("root_gradients"), py::arg("split_checkpointed") = false, "I.")
      .def("weight", &StageBackward::weight, py::call_guard<py::gil_scoped_release>(), "W.")
      .def("input_gradients", &StageBackward::input_gradients, "By input; None if none came.")
      .def_property_readonly("why_not_split", &StageBackward::why_not_split, "Or nothing.");
}

}  // namespace pydist
