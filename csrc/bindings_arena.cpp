// Tensors in the arena, whose memory peers can reach.
#include <torch/csrc/utils/pybind.h>

#include <vector>

#include "base/check.h"
#include "bindings.h"
#include "transport/arena.h"

namespace py = pybind11;

namespace pydist {

namespace {

void free_block(void* block) { Arena::if_exists()->deallocate(block); }

// A contiguous tensor in the arena, not initialised.
at::Tensor arena_empty(const std::vector<int64_t>& sizes, at::ScalarType dtype) {
  int64_t nbytes = static_cast<int64_t>(c10::elementSize(dtype));
  for (const int64_t size : sizes) {
    PYDIST_CHECK(size >= 0, UsageError, "a tensor cannot have size ", size);
    PYDIST_CHECK(!__builtin_mul_overflow(nbytes, size, &nbytes), UsageError,
                 "a tensor of this shape has too many bytes");
  }
  void* block = nbytes > 0 ? Arena::instance().allocate(static_cast<size_t>(nbytes)) : nullptr;
  c10::DataPtr data(block, block, block != nullptr ? &free_block : &c10::detail::deleteNothing,
                    at::kCPU);
  c10::Storage storage(c10::Storage::use_byte_size_t(), nbytes, std::move(data), nullptr, false);
  at::Tensor tensor = at::detail::make_tensor<at::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
      c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

bool in_arena(const at::Tensor& tensor) {
  const Arena* arena = Arena::if_exists();
  return arena != nullptr && tensor.numel() > 0 && arena->contains(tensor.const_data_ptr());
}

}  // namespace

void bind_arena(py::module_& module) {
  module.def("arena_empty", &arena_empty, py::arg("sizes"), py::arg("dtype"),
             "A contiguous tensor in this process's arena, not initialised.");
  module.def("in_arena", &in_arena, py::arg("tensor"),
             "True if peers can reach the tensor's memory.");
}

}  // namespace pydist
