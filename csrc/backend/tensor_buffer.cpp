#include "backend/tensor_buffer.h"

#include <optional>

#include "backend/torch_dtype.h"
#include "base/check.h"

namespace pydist {

Buffer buffer_of(const at::Tensor& tensor, Arithmetic arithmetic) {
  PYDIST_CHECK(tensor.layout() == at::kStrided && tensor.is_cpu(), UsageError,
               "expected a dense tensor on the CPU, found ", tensor.layout(), " on ",
               tensor.device());
  const std::optional<DType> dtype = dtype_of(tensor.scalar_type());
  PYDIST_CHECK(dtype || arithmetic == Arithmetic::kNone, UsageError, "cannot reduce tensors of ",
               c10::toString(tensor.scalar_type()));
  Buffer buffer;
  buffer.data = tensor.mutable_data_ptr();
  buffer.block = tensor.storage().mutable_data();
  buffer.dtype = dtype.value_or(DType::kUInt8);
  buffer.num_elements = dtype ? tensor.numel() : static_cast<int64_t>(tensor.nbytes());
  return buffer;
}

Buffer contiguous_buffer(const at::Tensor& tensor, Arithmetic arithmetic) {
  PYDIST_CHECK(tensor.is_contiguous(), UsageError, "expected a contiguous tensor");
  return buffer_of(tensor, arithmetic);
}

}  // namespace pydist
