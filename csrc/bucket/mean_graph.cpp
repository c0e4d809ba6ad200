#include "bucket/mean_graph.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include <exception>

#include "base/error.h"
#include "base/python_boundary.h"

namespace pydist {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

class MeanOverRanks final : public torch::autograd::Function<MeanOverRanks> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor&, const at::Tensor& mean,
                            const std::string& parameter_name) {
    context->saved_data["parameter"] = parameter_name;
    return mean.detach();
  }
  static variable_list backward(AutogradContext* context, const variable_list&) {
    rethrow_through_torch(std::make_exception_ptr(UsageError(concat(
        "a backward went through the gradient of parameter ",
        context->saved_data["parameter"].toStringRef(),
        ", which is a mean over ranks since backward(create_graph=True) and has no derivative on "
        "one of them; compute inner gradients with torch.autograd.grad(..., create_graph=True)"))));
  }
};

}  // namespace

at::Tensor without_derivative(const at::Tensor& mean, const std::string& parameter_name) {
  const at::AutoGradMode with_grad(true);
  const at::Tensor source = at::zeros({}, mean.options()).requires_grad_();
  return MeanOverRanks::apply(source, mean, parameter_name);
}

}  // namespace pydist
