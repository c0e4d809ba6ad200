// The gradient of a tensor that another stage made: where autograd's graph of this stage ends.
//
//   sender's stage  |  receiver's stage
//   output ~ ~ ~ ~ ~|~ ~> received --grad_fn--> node that keeps the gradient, for the sender
//
// The received tensor is no leaf, so a stage may change it in place (a leaf would raise), and no
// AccumulateGrad stands in between.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>

#include "pipeline/node_pointer.h"

namespace pydist {

// A handle: copies mean the same edge. The graph holds the node, and the node holds only the
// gradient, so nothing here keeps a stage's values alive.
class ReceivedEdge {
 public:
  // Shares the memory and the version counter of `data`: if anybody else has saved that, what the
  // stage changes in place is noticed, as in the unsplit model.
  // `received`: what the stage gets; it requires grad, so `data` is floating or complex.
  ReceivedEdge(const at::Tensor& data, at::Tensor& received);

  // What arrived since the last call; undefined if nothing did.
  at::Tensor take_gradient();
  torch::autograd::Edge edge() const { return {node_, 0}; }

 private:
  NodePtr node_;
};

// For nodes and hooks of a stage's backward, of which compiled autograd would make something else.
[[noreturn]] void refuse_compiled_autograd();

}  // namespace pydist
