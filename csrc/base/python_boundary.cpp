#include "base/python_boundary.h"

namespace pydist {

namespace {
Rethrow installed_rethrow = nullptr;  // set once, at import
}

void set_torch_rethrow(Rethrow rethrow) { installed_rethrow = rethrow; }

void rethrow_through_torch(std::exception_ptr error) {
  if (installed_rethrow != nullptr) installed_rethrow(error);
  std::rethrow_exception(error);
}

}  // namespace pydist
