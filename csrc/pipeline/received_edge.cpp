#include "pipeline/received_edge.h"

#include <ATen/ops/add.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <string>
#include <utility>

#include "base/error.h"

namespace pydist {

namespace {

using torch::autograd::Edge;
using torch::autograd::Node;
using torch::autograd::variable_list;

class ReceivedNode final : public Node {
 public:
  std::string name() const override { return "ReceivedFromStage"; }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {
    refuse_compiled_autograd();
  }
  // The engine has added up what comes from this backward. There is more than one only where the
  // stage's own forward ran a backward through what it had received.
  variable_list apply(variable_list&& gradients) override {
    at::Tensor& arrived = gradients[0];
    if (!arrived.defined()) return {};
    gradient_ = gradient_.defined() ? at::add(gradient_, arrived) : std::move(arrived);
    return {};
  }
  at::Tensor take_gradient() { return std::exchange(gradient_, at::Tensor()); }

 private:
  at::Tensor gradient_;
};

}  // namespace

void refuse_compiled_autograd() {
  throw UsageError(
      "a pipeline stage's backward cannot run under compiled autograd; switch "
      "torch._dynamo.config.compiled_autograd off (the forward may be compiled)");
}

ReceivedEdge::ReceivedEdge(const at::Tensor& data, at::Tensor& received)
    : node_(make_node<ReceivedNode>()) {
  received = data.detach();
  node_->add_input_metadata(received);
  torch::autograd::impl::set_gradient_edge(received, edge());
}

at::Tensor ReceivedEdge::take_gradient() {
  return static_cast<ReceivedNode&>(*node_).take_gradient();
}

}  // namespace pydist
