// Carries typed errors through torch's autograd engine and its process groups, which would turn
// them into plain RuntimeErrors.
#pragma once

#include <exception>

#include "base/error.h"

namespace pydist {

// Installed by the bindings: throws what torch hands to Python unchanged.
using Rethrow = void (*)(std::exception_ptr);
void set_torch_rethrow(Rethrow rethrow);
[[noreturn]] void rethrow_through_torch(std::exception_ptr error);

}  // namespace pydist
