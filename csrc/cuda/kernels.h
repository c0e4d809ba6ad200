// Finds the device functions of the kernels by the names that their descriptors have.
#pragma once

#include <string>

namespace pydist {

// What cudaLaunchKernel takes, with one argument, the struct of the descriptor; null where there is
// no such kernel.
const void* find_device_function(const std::string& name);

}  // namespace pydist
