// Carries typed errors through torch's autograd engine, which would turn them into plain
// RuntimeErrors.
#pragma once

#include <exception>

#include "base/error.h"

namespace pydist {

// Installed by the bindings: throws what torch hands to Python unchanged.
using Rethrow = void (*)(std::exception_ptr);
void set_autograd_rethrow(Rethrow rethrow);
[[noreturn]] void rethrow_through_autograd(std::exception_ptr error);

// Runs what a hook or a callback does.
template <class Action>
void at_autograd_boundary(Action&& action) {
  try {
    action();
  } catch (const Error&) {
    rethrow_through_autograd(std::current_exception());
  }
}

}  // namespace pydist
