// A stage's forward as Python sees it: its context, the seeds of its layers, and skips.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>

#include "base/error.h"
#include "bindings.h"
#include "pipeline/stage_context.h"

namespace py = pybind11;

namespace pydist {

namespace {

// Once per layer and microbatch: without pybind11's dispatch, which would double its time.
PyObject* seed_layer(PyObject* /*module*/, PyObject* layer) {
  const StageContext* context = current_stage_context();
  if (context != nullptr) {
    const int64_t index = PyLong_AsLongLong(layer);
    if (index == -1 && PyErr_Occurred() != nullptr) return nullptr;
    context->seed_layer(index);
  }
  Py_RETURN_NONE;
}

PyMethodDef seed_layer_definition = {
    "seed_layer", seed_layer, METH_O,
    "Within a stage's forward, seeds the default CPU generator for this layer and microbatch."};

// None is an undefined tensor.
at::Tensor tensor_or_none(const std::optional<at::Tensor>& tensor) {
  return tensor.value_or(at::Tensor());
}

std::optional<at::Tensor> take(StageContext& context, const std::string& name) {
  const std::optional<at::Tensor> found = context.skips.take(name);
  if (!found.has_value()) {
    throw UsageError(concat("nothing is stashed as skip '", name, "' in stage ", context.stage,
                            ", microbatch ", context.microbatch,
                            ": was it popped already, did its layer not stash it, or is it not "
                            "declared with pydist.skippable?"));
  }
  return found->defined() ? found : std::nullopt;
}

// For tests and for running a stage without the executor, which holds its contexts itself.
class PythonStageContext {
 public:
  PythonStageContext(int stage, int64_t step, int microbatch, bool training,
                     std::optional<uint64_t> base_seed, int data_parallel_rank)
      : context_{stage, step, microbatch, training, base_seed, data_parallel_rank} {}

  void enter() {
    if (scope_ != nullptr) throw UsageError("this context of a stage is entered already");
    const py::gil_scoped_release no_gil;  // it may wait for another thread's forward
    scope_ = std::make_unique<StageScope>(context_);
  }
  void exit() { scope_.reset(); }
  void put(const std::string& name, const std::optional<at::Tensor>& tensor) {
    context_.skips.put(name, tensor_or_none(tensor));
  }
  std::optional<at::Tensor> take(const std::string& name) { return pydist::take(context_, name); }

 private:
  StageContext context_;
  std::unique_ptr<StageScope> scope_;
};

StageContext& running_context() {
  StageContext* context = current_stage_context();
  if (context == nullptr) throw UsageError("no stage's forward is running");
  return *context;
}

}  // namespace

void bind_stage(py::module_& module) {
  module.attr("seed_layer") =
      py::reinterpret_steal<py::object>(PyCFunction_New(&seed_layer_definition, nullptr));
  module.def(
      "in_stage", [] { return current_stage_context() != nullptr; },
      "Whether this thread is running a stage's forward.");
  module.def(
      "stage_trains", [] { return running_context().training; },
      "Whether a backward follows the stage's forward that this thread is running.");
  module.def(
      "put_skip",
      [](const std::string& name, const std::optional<at::Tensor>& tensor) {
        running_context().skips.put(name, tensor_or_none(tensor));
      },
      py::arg("name"), py::arg("tensor"), "Stashes a tensor or None in the running forward.");
  module.def(
      "take_skip", [](const std::string& name) { return take(running_context(), name); },
      py::arg("name"), "Pops what was stashed in the running forward, or has arrived for it.");
  py::class_<PythonStageContext>(module, "StageContext",
                                 "One forward of a stage: `with StageContext(...)`.")
      .def(py::init<int, int64_t, int, bool, std::optional<uint64_t>, int>(), py::arg("stage"),
           py::arg("step"), py::arg("microbatch"), py::arg("training"), py::arg("base_seed"),
           py::arg("data_parallel_rank"))
      .def("__enter__",
           [](PythonStageContext& self) -> PythonStageContext& {
             self.enter();
             return self;
           })
      .def("put", &PythonStageContext::put, py::arg("name"), py::arg("tensor"),
           "What arrives for the forward.")
      .def("take", &PythonStageContext::take, py::arg("name"), "What the forward has stashed.")
      .def("__exit__", [](PythonStageContext& self, const py::args&) { self.exit(); });
}

}  // namespace pydist
