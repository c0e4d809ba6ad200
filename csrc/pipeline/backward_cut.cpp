#include "pipeline/backward_cut.h"

#include <ATen/ops/empty.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <utility>

#include "base/check.h"
#include "base/error.h"

namespace pydist {

namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::FunctionPreHook;
using torch::autograd::Node;
using torch::autograd::variable_list;

IsRecomputed is_recomputed = nullptr;  // set once, at import

// Backward runs outside of autocast, which a step enters around all its actions.
void run_engine(const edge_list& roots, const variable_list& gradients, bool keep_graph) {
  const c10::impl::ExcludeDispatchKeyGuard without_autocast(c10::autocast_dispatch_keyset);
  torch::autograd::Engine::get_default_engine().execute(roots, gradients, keep_graph,
                                                        /*create_graph=*/false,
                                                        /*accumulate_grad=*/true);
}

int64_t version_of(const at::Tensor& tensor) {
  return tensor.defined() && !tensor.is_inference() ? tensor._version() : 0;
}

// Where W begins: gives each node of the boundary what arrived there in I. The engine's own root
// knows no undefined gradients; here they are passed on as in a whole backward, in which a node
// runs (and its hooks, and those of what lies below it) even if nothing arrived.
class WeightRoot final : public Node {
 public:
  WeightRoot(edge_list&& edges, variable_list&& gradients)
      : Node(std::move(edges)), gradients_(std::move(gradients)) {}
  variable_list apply(variable_list&&) override { return std::exchange(gradients_, {}); }

 private:
  variable_list gradients_;
};

// What starts it, on the device and stream of what it gives.
at::Tensor starter(const variable_list& gradients) {
  for (const at::Tensor& gradient : gradients) {
    if (gradient.defined()) return at::empty({0}, gradient.options().layout(at::kStrided));
  }
  return at::empty({0});
}

void release(Node& node) {
  node.will_release_variables();
  node.release_variables();
}

edge_list take_weight_edges(Node& node, const GraphCut& cut) {
  edge_list taken(node.num_outputs());
  for (size_t i = 0; i < taken.size(); ++i) {
    Edge& edge = node.next_edges()[i];
    if (edge.is_valid() && !cut.is_input_side(edge.function.get())) std::swap(edge, taken[i]);
  }
  return taken;
}

void forget_hooks(Node& node) {
  node.pre_hooks().clear();
  node.tensor_pre_hooks().clear();
  node.retains_grad_hooks().clear();
}

}  // namespace

void set_recompute_check(IsRecomputed check) { is_recomputed = check; }

// The last pre-hook of a boundary node: sees what the node sees.
class StageBackward::KeepGradients final : public FunctionPreHook {
 public:
  KeepGradients(Node& node, const GraphCut& cut) : node_(node) {
    kept_.weight_edges = take_weight_edges(node, cut);
  }
  // A node whose saved values nobody needs once this hook is called.
  void add_done(Node* node) { done_.push_back(node); }
  variable_list operator()(const variable_list& gradients) override {
    kept_.gradients = gradients;
    for (const at::Tensor& gradient : gradients) kept_.versions.push_back(version_of(gradient));
    for (Node* node : done_) release(*node);
    return gradients;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {
    refuse_compiled_autograd();
  }
  Kept take() {
    kept_.node = node_.getptr();
    return std::move(kept_);
  }

 private:
  Node& node_;  // which owns this hook, so no pointer that would keep it
  Kept kept_;
  std::vector<Node*> done_;
};

void StageBackward::Roots::add(const Edge& edge, const at::Tensor& gradient) {
  edges.push_back(edge);
  gradients.push_back(gradient);
}

StageBackward::StageBackward(const std::vector<at::Tensor>& outputs,
                             std::vector<ReceivedEdge> inputs)
    : inputs_(std::move(inputs)) {
  for (const at::Tensor& output : outputs) {
    const bool takes_part = output.defined() && output.requires_grad();
    outputs_.push_back(takes_part ? torch::autograd::impl::gradient_edge(output) : Edge());
  }
}

// Leaves no edge here, so that the graph goes as soon as it has been run.
StageBackward::Roots StageBackward::take_roots(const std::vector<at::Tensor>& root_gradients) {
  const edge_list outputs = std::exchange(outputs_, {});
  PYDIST_CHECK(root_gradients.size() == outputs.size(), UsageError, "backward of a stage with ",
               outputs.size(), " outputs got ", root_gradients.size(),
               " gradients; it runs once, right after its forward");
  Roots roots;
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (!root_gradients[i].defined()) continue;
    PYDIST_CHECK(outputs[i].is_valid(), UsageError, "a gradient came for output ", i,
                 " of a stage, which does not require one");
    roots.add(outputs[i], root_gradients[i]);
  }
  return roots;
}

void StageBackward::backward(const std::vector<at::Tensor>& root_gradients) {
  const Roots roots = take_roots(root_gradients);
  if (!roots.edges.empty()) run_engine(roots.edges, roots.gradients, false);
}

void StageBackward::input(const std::vector<at::Tensor>& root_gradients, bool split_checkpointed) {
  Roots roots = take_roots(root_gradients);
  if (roots.edges.empty()) return;
  if (inputs_.empty()) return run_engine(roots.edges, roots.gradients, false);
  const GraphCut cut(roots.edges, input_edges());
  why_not_split_ = find_obstacle(cut, split_checkpointed);
  if (!why_not_split_.empty()) return run_engine(roots.edges, roots.gradients, false);
  Roots input_roots;
  for (size_t i = 0; i < roots.edges.size(); ++i) {
    Roots& part = cut.is_input_side(roots.edges[i].function.get()) ? input_roots : weight_roots_;
    part.add(roots.edges[i], roots.gradients[i]);
  }
  roots = {};
  if (!input_roots.edges.empty()) run_input(cut, input_roots);
}

edge_list StageBackward::input_edges() const {
  edge_list edges;
  for (const ReceivedEdge& input : inputs_) edges.push_back(input.edge());
  return edges;
}

std::string StageBackward::find_obstacle(const GraphCut& cut, bool split_checkpointed) {
  if (!cut.why_not().empty() || split_checkpointed || is_recomputed == nullptr) {
    return cut.why_not();
  }
  for (Node* node : cut.boundary()) {
    if (is_recomputed(node->getptr())) {
      return "torch.utils.checkpoint would run its layers' forward once for I and again for W";
    }
  }
  return "";
}

void StageBackward::run_input(const GraphCut& cut, const Roots& roots) {
  const std::vector<KeepGradients*> hooks = prepare_boundary(cut);
  const bool keep_graph = !hooks.empty();
  run_engine(roots.edges, roots.gradients, keep_graph);
  if (!keep_graph) return;
  for (size_t i = 0; i < cut.inner().size(); ++i) {
    if (cut.done_before()[i] == GraphCut::kNone) release(*cut.inner()[i]);
  }
  for (KeepGradients* hook : hooks) boundary_.push_back(hook->take());
  for (Kept& kept : boundary_) {
    forget_hooks(*kept.node);                                // they have run, ours among them
    kept.node->next_edges() = std::move(kept.weight_edges);  // frees what was below it
  }
  own_what_leaves_took(cut);
}

// Leaves the boundary only the edges that I needs. The hooks belong to the nodes.
std::vector<StageBackward::KeepGradients*> StageBackward::prepare_boundary(const GraphCut& cut) {
  std::vector<KeepGradients*> hooks;
  for (Node* node : cut.boundary()) {
    auto hook = std::make_unique<KeepGradients>(*node, cut);
    hooks.push_back(hook.get());
    node->add_pre_hook(std::move(hook));
  }
  for (size_t i = 0; i < cut.inner().size(); ++i) {
    const int32_t later = cut.done_before()[i];
    if (later != GraphCut::kNone) hooks[later]->add_done(cut.inner()[i]);
  }
  return hooks;
}

// A leaf whose gradient came in I may have made a kept gradient's memory its `.grad`, to which the
// next microbatch adds in place.
void StageBackward::own_what_leaves_took(const GraphCut& cut) {
  for (const NodePtr& leaf : cut.leaves_of_input_side()) {
    const auto* accumulator = dynamic_cast<const AccumulateGrad*>(leaf.get());
    if (accumulator == nullptr) continue;
    const at::Tensor& taken = accumulator->variable.grad();
    if (!taken.defined() || !taken.has_storage()) continue;
    for (Kept& kept : boundary_) {
      for (size_t i = 0; i < kept.gradients.size(); ++i) {
        at::Tensor& gradient = kept.gradients[i];
        if (!gradient.defined() || !gradient.has_storage() || !gradient.is_alias_of(taken))
          continue;
        gradient = gradient.clone();
        kept.versions[i] = version_of(gradient);
      }
    }
  }
}

void StageBackward::weight() {
  Roots roots = std::exchange(weight_roots_, {});
  for (Kept& kept : std::exchange(boundary_, {})) {
    for (size_t i = 0; i < kept.gradients.size(); ++i) {
      PYDIST_CHECK(version_of(kept.gradients[i]) == kept.versions[i], UsageError,
                   "the gradient that arrived at ", kept.node->name(),
                   " was changed in place before the parameters' gradients could be computed from "
                   "it: a hook or a custom Function's backward writes to what it is given; let it "
                   "return a new tensor");
      roots.add(Edge(kept.node, static_cast<uint32_t>(i)), kept.gradients[i]);
    }
  }
  if (roots.edges.empty()) return;
  const at::Tensor start = starter(roots.gradients);
  const NodePtr root = make_node<WeightRoot>(std::move(roots.edges), std::move(roots.gradients));
  root->add_input_metadata(start);
  run_engine({Edge(root, 0)}, {start}, false);
}

std::vector<at::Tensor> StageBackward::input_gradients() {
  std::vector<at::Tensor> gradients;
  for (ReceivedEdge& input : inputs_) gradients.push_back(input.take_gradient());
  return gradients;
}

}  // namespace pydist
