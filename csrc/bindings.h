// What the parts of the Python boundary offer each other; one file a layer keeps rebuilds short.
#pragma once

#include <pybind11/pybind11.h>

namespace pydist {

void bind_collective(pybind11::module_& module);
void bind_reducer(pybind11::module_& module);
void bind_stage(pybind11::module_& module);
void bind_testing(pybind11::module_& module);

}  // namespace pydist
