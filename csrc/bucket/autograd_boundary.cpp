#include "bucket/autograd_boundary.h"

namespace pydist {

namespace {
Rethrow installed_rethrow = nullptr;  // set once, at import
}

void set_autograd_rethrow(Rethrow rethrow) { installed_rethrow = rethrow; }

void rethrow_through_autograd(std::exception_ptr error) {
  if (installed_rethrow != nullptr) installed_rethrow(error);
  std::rethrow_exception(error);
}

}  // namespace pydist
