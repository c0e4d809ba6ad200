// The pipeline's executor as Python sees it, and the codec of values for tests.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "pipeline/executor.h"
#include "pipeline/python_stage.h"
#include "pipeline/value_codec.h"

namespace py = pybind11;

namespace pydist {

namespace {

THPObjectPtr reference(const py::object& object) {
  return THPObjectPtr(object.is_none() ? nullptr : object.inc_ref().ptr());
}

// "ValueError: the text", of the Python error that is set; it stays set.
std::string text_of_error(const py::handle& error) {
  const auto type = py::type::of(error).attr("__name__").cast<std::string>();
  return type + ": " + py::str(error).cast<std::string>();
}

// Adds where it was raised to an exception on its way to the user. In Python 3.10 exceptions have
// no notes: there it goes behind the message.
void add_note(const py::object& error, const std::string& note) {
  if (py::hasattr(error, "add_note")) {
    error.attr("add_note")(note);
    return;
  }
  const py::tuple arguments = error.attr("args");
  if (arguments.size() == 1 && py::isinstance<py::str>(arguments[0])) {
    error.attr("args") = py::make_tuple(arguments[0].cast<std::string>() + "\n" + note);
  }
}

// From the channel: it names what was waited for already.
bool is_from_waiting(const py::handle& error) {
  const auto errors = py::module_::import("pydist.errors");
  return PyErr_GivenExceptionMatches(error.ptr(), errors.attr("PeerError").ptr()) != 0 ||
         PyErr_GivenExceptionMatches(error.ptr(), errors.attr("TimeoutError").ptr()) != 0 ||
         PyErr_GivenExceptionMatches(error.ptr(), errors.attr("MismatchError").ptr()) != 0;
}

// Of a warning: from run() through _run, _run_with_loss and step to the line that called that.
constexpr int kUserStackLevel = 4;

using PortalTuple = std::tuple<int, std::string, int, int>;  // port, name, from stage, to stage

// One rank's executor with the Python code of its stages.
class PipelineExecutor {
 public:
  PipelineExecutor(const Schedule& schedule, int rank, std::shared_ptr<Channel> channel,
                   const std::map<int, py::object>& stages, bool unpacks,
                   const std::vector<PortalTuple>& portals, std::optional<uint64_t> base_seed,
                   int data_parallel_rank, std::optional<at::Device> device)
      : num_microbatches_(schedule.num_microbatches) {
    ExecutorOptions options;
    options.schedule = schedule;
    options.rank = rank;
    options.channel = std::move(channel);
    options.base_seed = base_seed;
    options.data_parallel_rank = data_parallel_rank;
    options.device = device;
    for (const auto& [stage, callable] : stages) {
      const bool is_last = stage == schedule.num_stages() - 1;
      stages_.push_back(std::make_shared<PythonStage>(callable.ptr(), stage, is_last, unpacks));
      options.stages.push_back({stage, stages_.back()});
      for (const auto& [port, name, from, to] : portals) {
        const auto link = [&](int other) {
          return Link{port, other, schedule.rank_of_stage[other], name};
        };
        if (stage == from) options.stages.back().skips_out.push_back(link(to));
        if (stage == to) options.stages.back().skips_in.push_back(link(from));
      }
    }
    options.warn = [](const std::string& text) {
      const py::gil_scoped_acquire gil;
      if (PyErr_WarnEx(PyExc_UserWarning, text.c_str(), kUserStackLevel) != 0)
        throw py::error_already_set();
    };
    executor_ = std::make_unique<Executor>(std::move(options));
  }

  py::object run(StepKind kind, int64_t step, std::optional<std::vector<int>> num_rows,
                 std::vector<double> loss_gradients,
                 std::map<int, std::shared_ptr<Reducer>> reducers, bool averages,
                 const py::dict& python) {
    const auto given = [&](const char* name) { return reference(python[name]); };
    auto shared = std::make_shared<PythonStep>(
        PythonStep{given("arguments"), given("keywords"), given("targets"), given("loss_fn"),
                   given("metrics"), given("finish"), given("outputs")});
    for (const auto& stage : stages_) stage->set_step(shared, num_microbatches_);
    StepOptions options{
        kind, step, std::move(num_rows), std::move(loss_gradients), std::move(reducers), averages};
    const py::object before_end = python["before_end"];
    options.before_end = [&before_end] {
      const py::gil_scoped_acquire gil;
      before_end();
    };
    std::optional<Message> result;
    std::exception_ptr failure;
    {
      const py::gil_scoped_release no_gil;
      try {
        result = executor_->run(std::move(options));
      } catch (...) {
        failure = std::current_exception();
      }
    }
    for (const auto& stage : stages_) stage->set_step(nullptr, 0);
    if (failure) raise(std::move(failure));
    if (!result) return py::none();
    return py::reinterpret_steal<py::object>(decode_value(result->structure, result->slots));
  }

  py::list records() const {
    py::list list;
    for (const ActionRecord& record : executor_->recorder().records()) {
      list.append(
          py::make_tuple(record.action.text(), record.start_ns, record.end_ns, record.wait_ns));
    }
    return list;
  }
  Executor& executor() { return *executor_; }
  void record(bool on, bool waits) { executor_->recorder().switch_on(on, waits); }

 private:
  // Tells the other ranks, and lets the exception go on with a note.
  [[noreturn]] void raise(std::exception_ptr failure) {
    set_python_error(std::exchange(failure, nullptr));
    py::error_already_set pending;
    const py::object error = pending.value();
    std::string where = executor_->where();
    for (const auto& stage : stages_) {
      if (!stage->inside().empty()) where += ", in " + stage->inside();
    }
    const std::string text = where + " raised " + text_of_error(error);
    if (!is_from_waiting(error)) add_note(error, "raised on " + where);
    {
      const py::gil_scoped_release no_gil;
      executor_->fail(text);
    }
    pending.restore();
    throw py::error_already_set();
  }

  std::unique_ptr<Executor> executor_;
  std::vector<std::shared_ptr<PythonStage>> stages_;
  const int num_microbatches_;
};

py::tuple encode(const py::object& value) {
  std::string structure;
  std::vector<Slot> slots;
  encode_value(value.ptr(), "value", structure, slots);
  py::list tensors;
  for (const Slot& slot : slots) tensors.append(py::cast(slot.tensor));
  return py::make_tuple(py::bytes(structure), tensors);
}

py::object decode(const std::string& structure, const std::vector<at::Tensor>& tensors) {
  std::vector<Slot> slots;
  for (const at::Tensor& tensor : tensors) slots.push_back({tensor, tensor.requires_grad()});
  return py::reinterpret_steal<py::object>(decode_value(structure, slots));
}

}  // namespace

void bind_pipeline(py::module_& module) {
  py::enum_<StepKind>(module, "StepKind", "What all ranks of a pipeline do together.")
      .value("TRAIN", StepKind::kTrain)
      .value("EVALUATE", StepKind::kEvaluate)
      .value("FORWARD", StepKind::kForward);
  py::class_<PipelineExecutor>(module, "PipelineExecutor",
                               "Runs one rank's part of a step; see csrc/pipeline/executor.h.")
      .def(
          py::init<const Schedule&, int, std::shared_ptr<Channel>, const std::map<int, py::object>&,
                   bool, const std::vector<PortalTuple>&, std::optional<uint64_t>, int,
                   std::optional<at::Device>>(),
          py::arg("schedule"), py::arg("rank"), py::arg("channel"), py::arg("stages"),
          py::arg("unpacks"), py::arg("portals"), py::arg("base_seed"),
          py::arg("data_parallel_rank"), py::arg("device"),
          "`channel` is None where this rank holds all stages. A portal is (port, name, from "
          "stage, "
          "to stage), see csrc/pipeline/stage_flight.h. `device`: of the stages, None for the CPU.")
      .def("run", &PipelineExecutor::run, py::arg("kind"), py::arg("step"), py::arg("num_rows"),
           py::arg("loss_gradients"), py::arg("reducers"), py::arg("averages"), py::arg("python"),
           "Collective. What `finish` returned on the last stage's rank; None for FORWARD.")
      .def(
          "refuse",
          [](PipelineExecutor& self, StepKind kind, const std::string& cause) {
            self.executor().refuse(kind, cause);
          },
          py::arg("kind"), py::arg("cause"), py::call_guard<py::gil_scoped_release>(),
          "Instead of run(): this rank cannot take part, which the others raise with the cause.")
      .def("record", &PipelineExecutor::record, py::arg("on"), py::arg("waits_for_device") = false,
           "Switches the recorder on or off, from the next step.")
      .def("records", &PipelineExecutor::records,
           "(action, start, end, wait) of the last step in ns; see csrc/pipeline/recorder.h.");
  auto testing = module.attr("testing").cast<py::module_>();
  testing.def("encode_value", &encode, py::arg("value"), "(bytes, tensors)");
  testing.def("decode_value", &decode, py::arg("structure"), py::arg("tensors"), "The value.");
}

}  // namespace pydist
