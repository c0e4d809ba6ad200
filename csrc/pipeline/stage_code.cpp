#include "pipeline/stage_code.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/variable.h>

namespace pydist {

void StageOutput::add(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    slots.emplace_back();
    roots.emplace_back();
    return;
  }
  const bool requires_grad = tensor.requires_grad() && at::GradMode::is_enabled();
  slots.push_back({tensor.detach(), requires_grad});
  roots.push_back(requires_grad ? torch::autograd::impl::gradient_edge(tensor)
                                : torch::autograd::Edge());
}

}  // namespace pydist
