// What one stage hands to another of the same rank, or to the user, must be as safe as a message: a
// copy that nobody else can change. Mostly nobody else holds it, and it is handed over as it is.
#pragma once

#include <ATen/core/Tensor.h>

namespace pydist {

// The values of `tensor` in memory that only the result holds. The same memory if `tensor` was its
// last holder, else a copy: a module may keep the buffer that it returned and fill it again, a
// graph have saved it, a `.grad` or a kept gradient be a view of it.
at::Tensor in_own_memory(at::Tensor tensor);

}  // namespace pydist
