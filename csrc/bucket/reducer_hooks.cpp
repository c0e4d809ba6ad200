// The reducer's hooks on autograd nodes. Hooks outlive the wrapper on graphs and on the module, so
// they hold it weakly.
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function_hook.h>

#include <algorithm>
#include <unordered_set>

#include "base/check.h"
#include "base/clock.h"
#include "bucket/reducer.h"

namespace pydist {

namespace {

using torch::autograd::FunctionPostHook;
using torch::autograd::FunctionPreHook;
using torch::autograd::PostAccumulateGradHook;
using torch::autograd::variable_list;
using torch::dynamo::autograd::CompiledNodeArgs;

// Compiled autograd turns a backward into a graph of its own, in which no hook of ours would run.
void refuse_compiled_autograd(const std::weak_ptr<Reducer>& hooked) {
  const auto reducer = hooked.lock();
  if (reducer == nullptr) return;
  reducer->guard([] {
    throw UsageError(
        "DataParallel averages gradients in hooks that compiled autograd does not run; switch "
        "torch._dynamo.config.compiled_autograd off (the forward may be compiled)");
  });
}

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
  void compiled_args(CompiledNodeArgs&) const override { refuse_compiled_autograd(reducer_); }

 private:
  std::weak_ptr<Reducer> reducer_;
  bool synchronize_;
};

class BeforeAccumulation final : public FunctionPreHook {
 public:
  BeforeAccumulation(std::weak_ptr<Reducer> reducer, int index)
      : reducer_(std::move(reducer)), index_(index) {}
  variable_list operator()(const variable_list& gradients) override {
    if (const auto reducer = reducer_.lock()) reducer->before_accumulation(index_, gradients);
    return gradients;
  }
  void compiled_args(CompiledNodeArgs&) const override { refuse_compiled_autograd(reducer_); }

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
  void compiled_args(CompiledNodeArgs&) const override { refuse_compiled_autograd(reducer_); }

 private:
  std::weak_ptr<Reducer> reducer_;
  int index_;
};

// Stands in a parameter's place for its post-accumulate hooks (one object in C++, whatever their
// number) and does nothing while they have to wait.
class DeferredHook final : public PostAccumulateGradHook {
 public:
  DeferredHook(std::weak_ptr<Reducer> reducer, int index,
               std::unique_ptr<PostAccumulateGradHook> original)
      : original_(std::move(original)), reducer_(std::move(reducer)), index_(index) {}
  void operator()(const at::Tensor& parameter) override {
    if (!waits()) run(parameter);
  }
  void run(const at::Tensor& parameter) { (*original_)(parameter); }
  bool waits() const {
    const auto reducer = reducer_.lock();
    return reducer != nullptr && reducer->defers(index_);
  }
  std::unique_ptr<PostAccumulateGradHook> take() { return std::move(original_); }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    original_->compiled_args(args);
  }
  void apply_with_saved(at::Tensor& parameter,
                        torch::dynamo::autograd::SwapSavedVariables& saved) override {
    original_->apply_with_saved(parameter, saved);
  }

 private:
  std::unique_ptr<PostAccumulateGradHook> original_;
  std::weak_ptr<Reducer> reducer_;
  int index_;
};

}  // namespace

bool Reducer::is_averaged(int index) const {
  const Parameter& parameter = parameters_[index];
  return reduces() && parameter.accumulator != nullptr && parameter.nbytes > 0;
}

// In a backward of this wrapper: one of the bare module is the user's own affair.
bool Reducer::defers(int index) const {
  return is_averaged(index) && (open_ || expecting_ || only_local_);
}

// Hooks come and go, and torch replaces the object when the first one comes, so this is looked at
// in every backward.
void Reducer::defer_hook(int index) {
  auto& hook = torch::autograd::impl::post_acc_grad_hooks(parameters_[index].variable);
  if (hook == nullptr) return;
  if (auto* deferred = dynamic_cast<DeferredHook*>(hook.get())) {
    if (deferred->waits()) return;
    hook = deferred->take();  // of another reducer, or one that is gone
  }
  hook = std::make_unique<DeferredHook>(weak_from_this(), index, std::move(hook));
}

// In the order in which gradients are usually ready.
void Reducer::run_deferred_hooks() {
  const at::AutoGradMode no_grad(false);
  for (int i = static_cast<int>(parameters_.size()) - 1; i >= 0; --i) {
    if (!used_by_any_.test(i) || !is_averaged(i)) continue;
    const at::Tensor& variable = parameters_[i].variable;
    const auto& hook = torch::autograd::impl::post_acc_grad_hooks(variable);
    if (hook == nullptr) continue;
    auto* deferred = dynamic_cast<DeferredHook*>(hook.get());
    if (deferred != nullptr) {
      deferred->run(variable);
    } else {
      (*hook)(variable);  // another rank used the parameter
    }
  }
}

// Units were laid out for what parameters were when they were wrapped.
void Reducer::check_unchanged(const Parameter& parameter) const {
  const at::Tensor& now = parameter.variable;
  PYDIST_CHECK(now.scalar_type() == parameter.dtype, UsageError, "parameter ", parameter.name,
               " was ", toString(parameter.dtype), " when it was wrapped in ", options_.name,
               ", and is ", toString(now.scalar_type()),
               " now; convert the module before wrapping it, or wrap it again");
  PYDIST_CHECK(now.sizes() == parameter.sizes && now.strides() == parameter.strides, UsageError,
               "parameter ", parameter.name, " had shape ", at::IntArrayRef(parameter.sizes),
               " and strides ", at::IntArrayRef(parameter.strides), " when it was wrapped in ",
               options_.name, ", and has shape ", now.sizes(), " and strides ", now.strides(),
               " now; wrap the module again");
}

// Hooks what is new: parameters that have thawed, or whose node torch has replaced since their data
// was set.
void Reducer::hook_parameters() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& parameter = parameters_[i];
    check_unchanged(parameter);
    if (!parameter.variable.requires_grad()) continue;
    Accumulator accumulator = torch::autograd::impl::grad_accumulator(parameter.variable);
    if (accumulator == parameter.accumulator) continue;
    unhook(parameter);
    const int index = static_cast<int>(i);
    parameter.accumulator = std::move(accumulator);
    auto pre_hook = std::make_unique<BeforeAccumulation>(weak_from_this(), index);
    parameter.pre_hook = pre_hook.get();
    parameter.accumulator->add_pre_hook(std::move(pre_hook));
    parameter.post_hook = parameter.accumulator->add_post_hook(
        std::make_unique<AfterAccumulation>(weak_from_this(), index));
  }
}

void Reducer::unhook(Parameter& parameter) {
  if (parameter.accumulator == nullptr) return;
  auto& pre_hooks = parameter.accumulator->pre_hooks();
  pre_hooks.erase(
      std::remove_if(pre_hooks.begin(), pre_hooks.end(),
                     [&](const auto& hook) { return hook.get() == parameter.pre_hook; }),
      pre_hooks.end());
  parameter.accumulator->del_post_hook(parameter.post_hook);
  parameter.accumulator = Accumulator();
}

void Reducer::detach_hooks() {
  for (Parameter& parameter : parameters_) unhook(parameter);
}

void Reducer::replace(int index, at::Tensor variable) {
  Parameter& parameter = parameters_[index];
  unhook(parameter);
  parameter.variable = std::move(variable);
}

std::vector<at::Tensor> Reducer::parameters() const {
  std::vector<at::Tensor> variables;
  variables.reserve(parameters_.size());
  for (const Parameter& parameter : parameters_) variables.push_back(parameter.variable);
  return variables;
}

void Reducer::prepare(bool synchronize) {
  try {
    hook_parameters();
  } catch (const UsageError& error) {
    // Peers would wait for this rank's backward.
    const UsageError with_rank = named(error);
    last_error_ = with_rank.what();
    if (synchronize) round_->fail(with_rank.what());
    throw with_rank;
  }
  if (synchronize) round_->check();
  if (synchronize) read_late_records();
  stats_.begin_forward(monotonic_ns());
}

void Reducer::watch(const std::vector<at::Tensor>& outputs, bool synchronize) {
  stats_.end_forward(monotonic_ns());
  expecting_ = synchronize;
  if (counters_.num_rounds > inner_round_) inner_gradient_ = false;  // a new step
  std::unordered_set<torch::autograd::Node*> watched;
  const auto watch_node = [&](const auto& node) {
    if (node != nullptr && watched.insert(node.get()).second) {
      node->add_pre_hook(std::make_unique<OutputHook>(weak_from_this(), synchronize));
    }
  };
  for (const at::Tensor& output : outputs) {
    if (!output.requires_grad()) continue;
    watch_node(output.grad_fn());
    // Writing to a view in place takes its node out of the graph, but not its base's.
    if (output.is_view()) watch_node(output._base().grad_fn());
  }
}

}  // namespace pydist
