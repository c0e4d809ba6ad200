// What the parts of the Python boundary offer each other; one file a layer keeps rebuilds short.
#pragma once

#include <pybind11/pybind11.h>

#include <exception>
#include <memory>

#include "collective/communicator.h"

namespace pydist {

void bind_arena(pybind11::module_& module);
void bind_backend(pybind11::module_& module);  // after bind_collective
void bind_collective(pybind11::module_& module);
void bind_device(pybind11::module_& module);             // after bind_testing
void bind_device_all_reduce(pybind11::module_& module);  // after bind_nccl
void bind_hosts(pybind11::module_& module);              // after bind_collective
void bind_nccl(pybind11::module_& module);
void bind_reducer(pybind11::module_& module);
void bind_schedule(pybind11::module_& module);
void bind_stage(pybind11::module_& module);
void bind_testing(pybind11::module_& module);
void bind_testing_channel(pybind11::module_& module);
void bind_testing_cut(pybind11::module_& testing);
void bind_testing_device(pybind11::module_& testing);
void bind_testing_kernels(pybind11::module_& testing);
void bind_testing_launch(pybind11::module_& testing);
void install_recompute_check();
void bind_pipeline(pybind11::module_& module);  // after bind_testing

// The end of a communicator waits for its worker, who may need the GIL to let go of tensors.
std::shared_ptr<Communicator> without_gil_at_end(std::shared_ptr<Communicator> communicator);

// Sets the Python error that stands for a C++ exception. With the GIL.
void set_python_error(const std::exception_ptr& error);

}  // namespace pydist
