#include "backend/plan.h"

#include <ATen/TensorIterator.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include "base/check.h"

namespace pydist {

namespace {

// True if the memory of a tensor is its values, one after the other.
bool in_order(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

at::Tensor in_order_copy(const at::Tensor& tensor) {
  return tensor.detach().resolve_conj().resolve_neg().contiguous();
}

void check_equal_types(const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors) {
    PYDIST_CHECK(tensor.layout() == at::kStrided && tensor.is_cpu(), UsageError,
                 "expected dense tensors on the CPU, found ", tensor.layout(), " on ",
                 tensor.device());
    PYDIST_CHECK(tensor.scalar_type() == tensors[0].scalar_type(), UsageError,
                 "invalid tensor type: expected tensors of one type, found ",
                 tensors[0].scalar_type(), " and ", tensor.scalar_type());
  }
}

// True if each of them begins where the one before ends, in one storage.
bool follow_each_other(const std::vector<at::Tensor>& tensors) {
  const char* next = nullptr;
  for (const at::Tensor& tensor : tensors) {
    if (!in_order(tensor) || !tensor.is_alias_of(tensors[0])) return false;
    const char* data = static_cast<const char*>(tensor.const_data_ptr());
    if (next != nullptr && data != next) return false;
    next = data + tensor.nbytes();
  }
  return next != nullptr;
}

// Of the first of tensors that follow each other, and of all of them.
Buffer buffer_over(const std::vector<at::Tensor>& tensors) {
  Buffer buffer = buffer_of(tensors[0], Arithmetic::kNone);
  for (size_t i = 1; i < tensors.size(); ++i) {
    buffer.num_elements += buffer_of(tensors[i], Arithmetic::kNone).num_elements;
  }
  return buffer;
}

// Without threads of torch's: a communicator's worker would get a team of its own, which waits
// busily, and in a forked process may not start.
void copy_alone(const at::Tensor& target, const at::Tensor& source) {
  if (target.numel() < at::internal::GRAIN_SIZE) {
    target.copy_(source);
    return;
  }
  int64_t dim = 0;
  while (target.size(dim) == 1) ++dim;
  const int64_t half = target.size(dim) / 2;
  const int64_t rest = target.size(dim) - half;
  copy_alone(target.narrow(dim, 0, half), source.narrow(dim, 0, half));
  copy_alone(target.narrow(dim, half, rest), source.narrow(dim, half, rest));
}

}  // namespace

Buffer Plan::read(const at::Tensor& tensor, Arithmetic arithmetic) {
  if (tensor.layout() != at::kStrided || in_order(tensor)) {
    const Buffer buffer = buffer_of(tensor, arithmetic);
    keep(tensor);
    return buffer;
  }
  const at::NoGradGuard no_grad;
  keep(in_order_copy(tensor));
  return buffer_of(kept_.back(), arithmetic);
}

Buffer Plan::write(const at::Tensor& tensor, Arithmetic arithmetic) {
  const Buffer buffer = read(tensor, arithmetic);
  if (!kept_.back().is_same(tensor)) copy_later(tensor, kept_.back());
  return buffer;
}

Buffer Plan::read_all(const std::vector<at::Tensor>& tensors, Arithmetic arithmetic) {
  check_equal_types(tensors);
  if (follow_each_other(tensors)) {
    keep(tensors[0]);
    (void)buffer_of(tensors[0], arithmetic);
    return buffer_over(tensors);
  }
  return buffer_of(copy_of_all(tensors), arithmetic);
}

at::Tensor Plan::copy_of_all(const std::vector<at::Tensor>& tensors) {
  check_equal_types(tensors);
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> parts;
  parts.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) parts.push_back(in_order_copy(tensor).view(-1));
  keep(at::cat(parts));
  return kept_.back();
}

Buffer Plan::write_all(const std::vector<at::Tensor>& tensors) {
  check_equal_types(tensors);
  if (follow_each_other(tensors)) {
    keep(tensors[0]);
    return buffer_over(tensors);
  }
  int64_t num_elements = 0;
  for (const at::Tensor& tensor : tensors) num_elements += tensor.numel();
  const at::NoGradGuard no_grad;
  const at::Tensor together = at::empty({num_elements}, tensors[0].options().requires_grad(false));
  keep(together);
  int64_t offset = 0;
  for (const at::Tensor& tensor : tensors) {
    copy_later(tensor, together.narrow(0, offset, tensor.numel()));
    offset += tensor.numel();
  }
  return buffer_of(together, Arithmetic::kNone);
}

void Plan::copy_later(const at::Tensor& tensor, const at::Tensor& source) {
  copies_.emplace_back(tensor.detach(), source);
}

// On whatever thread ends the operation: into inference tensors too, and noting nothing for
// autograd, as where the engine writes by itself.
void Plan::copy_back() {
  const at::AutoDispatchBelowADInplaceOrView plain_kernels;
  for (const auto& [tensor, source] : copies_) copy_alone(tensor, source.view(tensor.sizes()));
  copies_.clear();
  if (later_) later_();
  later_ = nullptr;
}

}  // namespace pydist
