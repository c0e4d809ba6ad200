// The Python boundary: the module, the translation of errors, and how waits let signals through.
#include "bindings.h"

#include <torch/csrc/Exceptions.h>

#include <exception>

#include "base/error.h"
#include "base/interrupt.h"
#include "base/python_boundary.h"
#include "pipeline/schedule.h"
#include "transport/arena.h"
#include "transport/board.h"

namespace py = pybind11;

namespace pydist {

namespace {

void raise_as(const char* name, const std::exception& error) {
  PyErr_SetString(py::module_::import("pydist.errors").attr(name).ptr(), error.what());
}

void translate(std::exception_ptr pending) {
  try {
    if (pending) std::rethrow_exception(pending);
  } catch (const UsageError& error) {
    raise_as("UsageError", error);
  } catch (const MismatchError& error) {
    raise_as("MismatchError", error);
  } catch (const PeerError& error) {
    raise_as("PeerError", error);
  } catch (const TimeoutError& error) {
    raise_as("TimeoutError", error);
  } catch (const HostError& error) {
    raise_as("HostError", error);
  } catch (const ResourceError& error) {
    raise_as("ResourceError", error);
  } catch (const ScheduleError& error) {
    raise_as("ScheduleError", error);
  }
}

}  // namespace

void set_python_error(const std::exception_ptr& error) {
  try {
    translate(error);
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
  }
}

namespace {

// For errors inside backward: a Python error in flight passes torch's engine as it is.
void rethrow_as_python_error(std::exception_ptr pending) {
  const py::gil_scoped_acquire gil;
  translate(pending);
  throw py::error_already_set();
}

// Python runs signal handlers in its main thread only; elsewhere this returns at once.
void run_signal_handlers() {
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

py::dict arena_usage() {
  py::dict usage;
  const Arena* arena = Arena::if_exists();
  usage["used_nbytes"] = arena == nullptr ? 0 : arena->used_nbytes();
  usage["committed_nbytes"] = arena == nullptr ? 0 : arena->committed_nbytes();
  usage["capacity_nbytes"] = arena == nullptr ? 0 : arena->capacity();
  return usage;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.doc() = "pydist's C++ engine";
  py::register_local_exception_translator(&translate);
  set_torch_rethrow(&rethrow_as_python_error);
  set_interrupt_check(&run_signal_handlers);
  module.def("arena_usage", &arena_usage,
             "Bytes of this process's arena: used, committed, capacity.");
  bind_arena(module);
  bind_collective(module);
  bind_backend(module);
  bind_hosts(module);
  bind_nccl(module);
  bind_device_all_reduce(module);
  bind_reducer(module);
  bind_schedule(module);
  bind_stage(module);
  bind_testing(module);
  bind_testing_channel(module);
  bind_device(module);
  py::module_ testing = module.attr("testing");
  bind_testing_cut(testing);
  bind_testing_device(testing);
  bind_testing_kernels(testing);
  bind_testing_launch(testing);
  install_recompute_check();
  bind_pipeline(module);
}

}  // namespace pydist
