#include "pipeline/own_memory.h"

namespace pydist {

at::Tensor in_own_memory(at::Tensor tensor) {
  if (!tensor.defined()) return tensor;
  // Without a base: of a view, autograd's bookkeeping holds the memory once more.
  at::Tensor alone = tensor.variable_data();
  tensor.reset();
  const bool is_last_holder = alone.has_storage() && alone.storage().use_count() == 1;
  return is_last_holder ? alone : alone.clone();
}

}  // namespace pydist
