// A stage whose code is Python: an nn.Module, and on the last stage the loss and the metrics.
//
// A forward takes the GIL once, and runs no other Python frame than the module's, the loss's and
// the metrics'.
#pragma once

#include <torch/csrc/python_headers.h>
#include <torch/csrc/utils/object_ptr.h>

#include <memory>
#include <vector>

#include "pipeline/stage_code.h"

namespace pydist {

// What Python passes to one step; each member may be null. With the GIL only.
struct PythonStep {
  THPObjectPtr arguments;  // of the first stage: a list with a tuple for each microbatch
  THPObjectPtr keywords;   // by stage: a list with a dict for each microbatch; or None
  THPObjectPtr targets;    // of the last stage: a list with one for each microbatch
  THPObjectPtr loss_fn;    // (output, target) -> loss
  THPObjectPtr metrics;    // (output, target) -> dict
  // (list of losses, list of dicts or None) -> what step() returns everywhere; absent ones are None
  THPObjectPtr finish;
  // A list with a place for each microbatch's output, detached; or null, if nobody wants them.
  THPObjectPtr outputs;
};

class PythonStage final : public StageCode {
 public:
  // Takes a reference to `callable`. A tuple becomes positional arguments if `unpacks`.
  PythonStage(PyObject* callable, int stage, bool is_last, bool unpacks);
  ~PythonStage() override;
  PythonStage(const PythonStage&) = delete;
  PythonStage& operator=(const PythonStage&) = delete;

  // Before a step; null: after it. With the GIL.
  void set_step(std::shared_ptr<PythonStep> step, int num_microbatches);

  void forward(const StageContext& context, Message* input, StageOutput& output) override;
  Message result() override;
  // Which of the step's own functions has raised, "loss_fn", say; empty: none.
  const std::string& inside() const { return inside_; }

 private:
  PyObject* call(int microbatch, Message* input);
  PyObject* keywords_of(int microbatch) const;
  void take_loss(int microbatch, PyObject* value, StageOutput& output);

  PyObject* callable_;
  const int stage_;
  const bool is_last_;
  const bool unpacks_;
  std::shared_ptr<PythonStep> step_;
  // By microbatch, of the last stage.
  THPObjectPtr losses_;
  THPObjectPtr metrics_;
  std::string inside_ = {};
};

}  // namespace pydist
