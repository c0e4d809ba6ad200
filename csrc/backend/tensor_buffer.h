// The memory of torch's tensors as the engine takes it.
#pragma once

#include <ATen/core/Tensor.h>

#include "collective/buffer.h"

namespace pydist {

enum class Arithmetic { kNeeded, kNone };

// The memory of a dense tensor on the CPU; UsageError for another. Types that the kernels do not
// know are bytes to operations that only move them.
Buffer buffer_of(const at::Tensor& tensor, Arithmetic arithmetic);

// The same; UsageError where the tensor is not contiguous.
Buffer contiguous_buffer(const at::Tensor& tensor, Arithmetic arithmetic);

}  // namespace pydist
