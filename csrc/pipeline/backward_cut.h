// The backward of one stage for one microbatch: whole (B), or as I, which gives the gradients of
// the stage's inputs, and W, which gives those of its parameters (graph_cut.h says how).
//
// I + W give the same bits as B: each edge of the graph is evaluated once, with the same operands,
// and sums are made in the same order, that of torch's engine. All hooks run as often as in B.
//
// Between I and W there live: the nodes of the boundary with what they saved, the gradients that
// arrived at them, and the weight side of the graph. Everything else is freed at the end of I.
//
// Custom functions cannot be cut: parameters that they use (and whatever lies below them) get their
// gradients in I. So I, like W, should run in ascending order of microbatches, or sums differ in
// the last bits.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "pipeline/graph_cut.h"
#include "pipeline/node_pointer.h"
#include "pipeline/received_edge.h"

namespace pydist {

// Whether what this node saved is computed again in backward (torch.utils.checkpoint without
// reentrance). Only Python can tell, so the bindings install it.
using IsRecomputed = bool (*)(const NodePtr&);
void set_recompute_check(IsRecomputed check);

// All calls without the GIL; user hooks and custom functions take it. Errors of theirs leave as the
// exceptions that they are; the object is of no use afterwards.
class StageBackward {
 public:
  // To be made right after the stage's forward. `outputs`: all its tensors, also those without
  // grad; their data is not kept. `inputs`: the edges of what it received.
  StageBackward(const std::vector<at::Tensor>& outputs, std::vector<ReceivedEdge> inputs);

  // The same from edges, for outputs whose data is gone; not valid where no grad is required.
  StageBackward(torch::autograd::edge_list outputs, std::vector<ReceivedEdge> inputs)
      : outputs_(std::move(outputs)), inputs_(std::move(inputs)) {}

  // One gradient per output, in their order. Undefined: this output takes no part.
  // Raises UsageError for a gradient of an output that requires none.
  void backward(const std::vector<at::Tensor>& root_gradients);
  // I. Where it cannot be split from W, or nobody waits for its result: all of B, now.
  // `split_checkpointed`: split even where that runs checkpointed layers' forward twice more; false
  // costs up to 2 us for each weight to find out, which one microbatch can do for all of a step.
  void input(const std::vector<at::Tensor>& root_gradients, bool split_checkpointed = false);
  // W, once after input(). Nothing if that ran all of B.
  void weight();

  // One per input, after backward() or input(), once. Undefined: nothing depended on this input.
  std::vector<at::Tensor> input_gradients();
  // After input(): whether it has split the graph at some node, so that none was checkpointed, or
  // that was no obstacle.
  bool was_cut() const { return !boundary_.empty(); }
  // After input(): why it ran B although there was something to split; empty if it did not.
  const std::string& why_not_split() const { return why_not_split_; }

 private:
  // A node of the boundary, between I and W.
  struct Kept {
    NodePtr node;
    torch::autograd::edge_list weight_edges;   // by edge of the node; invalid: was I's
    torch::autograd::variable_list gradients;  // that arrived at it in I
    std::vector<int64_t> versions;             // theirs, when they arrived
  };
  class KeepGradients;
  struct Roots {
    torch::autograd::edge_list edges;
    torch::autograd::variable_list gradients;
    void add(const torch::autograd::Edge& edge, const at::Tensor& gradient);
  };

  Roots take_roots(const std::vector<at::Tensor>& root_gradients);
  torch::autograd::edge_list input_edges() const;
  static std::string find_obstacle(const GraphCut& cut, bool split_checkpointed);
  void run_input(const GraphCut& cut, const Roots& roots);
  std::vector<KeepGradients*> prepare_boundary(const GraphCut& cut);
  void own_what_leaves_took(const GraphCut& cut);

  torch::autograd::edge_list outputs_;  // invalid: that output requires no grad
  std::vector<ReceivedEdge> inputs_;
  std::vector<Kept> boundary_;
  Roots weight_roots_;  // outputs that depend on parameters only
  std::string why_not_split_;
};

}  // namespace pydist
