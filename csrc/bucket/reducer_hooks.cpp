// The reducer's hooks on autograd nodes. Hooks outlive the wrapper on graphs and on the module, so
// they hold it weakly.
#include <torch/csrc/autograd/function_hook.h>

#include <algorithm>
#include <unordered_set>

#include "bucket/reducer.h"

namespace pydist {

namespace {

using torch::autograd::FunctionPostHook;
using torch::autograd::FunctionPreHook;
using torch::autograd::variable_list;

class OutputHook final : public FunctionPreHook {
 public:
  OutputHook(std::weak_ptr<Reducer> reducer, bool synchronize)
      : reducer_(std::move(reducer)), synchronize_(synchronize) {}
  variable_list operator()(const variable_list& gradients) override {
    if (const auto reducer = reducer_.lock()) {
      reducer->guard([&] { reducer->on_output(synchronize_); });
    }
    return gradients;
  }

 private:
  std::weak_ptr<Reducer> reducer_;
  bool synchronize_;
};

class BeforeAccumulation final : public FunctionPreHook {
 public:
  BeforeAccumulation(std::weak_ptr<Reducer> reducer, int index)
      : reducer_(std::move(reducer)), index_(index) {}
  variable_list operator()(const variable_list& gradients) override {
    if (const auto reducer = reducer_.lock()) reducer->before_accumulation(index_);
    return gradients;
  }

 private:
  std::weak_ptr<Reducer> reducer_;
  int index_;
};

class AfterAccumulation final : public FunctionPostHook {
 public:
  AfterAccumulation(std::weak_ptr<Reducer> reducer, int index)
      : reducer_(std::move(reducer)), index_(index) {}
  variable_list operator()(const variable_list& outputs, const variable_list& incoming) override {
    if (const auto reducer = reducer_.lock()) {
      reducer->guard([&] { reducer->after_accumulation(index_, incoming); });
    }
    return outputs;
  }

 private:
  std::weak_ptr<Reducer> reducer_;
  int index_;
};

}  // namespace

void Reducer::hook_parameters() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& parameter = parameters_[i];
    if (parameter.accumulator != nullptr || !parameter.variable.requires_grad()) continue;
    const int index = static_cast<int>(i);
    parameter.accumulator = torch::autograd::impl::grad_accumulator(parameter.variable);
    auto pre_hook = std::make_unique<BeforeAccumulation>(weak_from_this(), index);
    parameter.pre_hook = pre_hook.get();
    parameter.accumulator->add_pre_hook(std::move(pre_hook));
    parameter.post_hook = parameter.accumulator->add_post_hook(
        std::make_unique<AfterAccumulation>(weak_from_this(), index));
  }
}

void Reducer::detach_hooks() {
  for (Parameter& parameter : parameters_) {
    if (parameter.accumulator == nullptr) continue;
    auto& pre_hooks = parameter.accumulator->pre_hooks();
    pre_hooks.erase(
        std::remove_if(pre_hooks.begin(), pre_hooks.end(),
                       [&](const auto& hook) { return hook.get() == parameter.pre_hook; }),
        pre_hooks.end());
    parameter.accumulator->del_post_hook(parameter.post_hook);
    parameter.accumulator = Accumulator();
  }
}

void Reducer::watch(const std::vector<at::Tensor>& outputs, bool synchronize) {
  if (synchronize) round_->check();
  hook_parameters();
  expecting_ = synchronize;
  std::unordered_set<torch::autograd::Node*> watched;
  for (const at::Tensor& output : outputs) {
    if (!output.requires_grad()) continue;
    const auto& node = output.grad_fn();
    if (node != nullptr && watched.insert(node.get()).second) {
      node->add_pre_hook(std::make_unique<OutputHook>(weak_from_this(), synchronize));
    }
  }
}

}  // namespace pydist
