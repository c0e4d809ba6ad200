// What is left of a gradient's graph (backward(create_graph=True)) once the gradient is a mean over
// ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace pydist {

// The same values, as part of a graph whose backward raises UsageError. This rank's graph tells how
// its own gradient came about, not the mean: following it would give local gradients silently.
at::Tensor without_derivative(const at::Tensor& mean, const std::string& parameter_name);

}  // namespace pydist
