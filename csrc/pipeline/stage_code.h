// What the executor asks of a stage's code, whatever language that is in.
#pragma once

#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <string>
#include <vector>

#include "pipeline/channel.h"
#include "pipeline/stage_context.h"

namespace pydist {

// What a forward gives to others: a value, and where its backward will start.
struct StageOutput {
  std::string structure = {};
  // Detached: they share memory and version counter with what the forward returned.
  std::vector<Slot> slots = {};
  // One per slot; not valid where the slot requires no gradient.
  torch::autograd::edge_list roots = {};

  // Takes the slot's tensor as the forward returned it; undefined is None.
  void add(const at::Tensor& tensor);
};

class StageCode {
 public:
  virtual ~StageCode() = default;
  // Runs the stage on `input`, whose tensors are ready for use and which may be taken apart; null
  // for the first stage, which has the step's own arguments. The last stage gives the loss, if the
  // step has one, and else nothing. `context` is entered already. Called without the GIL.
  virtual void forward(const StageContext& context, Message* input, StageOutput& output) = 0;
  // Of the last stage, once all its forwards are done: what every rank gets from the step.
  virtual Message result() = 0;
};

}  // namespace pydist
