#include "pipeline/python_stage.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/python_variable.h>

#include <utility>

#include "base/check.h"
#include "pipeline/own_memory.h"
#include "pipeline/value_classes.h"
#include "pipeline/value_codec.h"

namespace pydist {

namespace {

class WithGil {
 public:
  WithGil() : state_(PyGILState_Ensure()) {}
  ~WithGil() { PyGILState_Release(state_); }
  WithGil(const WithGil&) = delete;
  WithGil& operator=(const WithGil&) = delete;

 private:
  PyGILState_STATE state_;
};

// The place of a list that a microbatch has; None where there is no list.
PyObject* item_of(PyObject* list, int microbatch) {
  if (list == nullptr || list == Py_None) return Py_None;
  PYDIST_CHECK(microbatch < PyList_GET_SIZE(list), Error, "no arguments for microbatch ",
               microbatch);
  return PyList_GET_ITEM(list, microbatch);
}

void put(PyObject* list, int microbatch, PyObject* item) {
  if (PyList_SetItem(list, microbatch, item) != 0) throw_python_error();
}

PyObject* list_of_none(Py_ssize_t size) {
  PyObject* list = checked(PyList_New(size));
  for (Py_ssize_t i = 0; i < size; ++i) PyList_SET_ITEM(list, i, Py_NewRef(Py_None));
  return list;
}

// A copy of the value with tensors that no graph hangs on, nor anything else: the next microbatch's
// output may lie in the same memory.
PyObject* detached(THPObjectPtr value) {
  std::string structure;
  std::vector<Slot> slots;
  encode_value(value.get(), "the last stage's output", structure, slots);
  value = nullptr;
  for (Slot& slot : slots) slot.tensor = in_own_memory(std::move(slot.tensor));
  return decode_value(structure, slots);
}

}  // namespace

PythonStage::PythonStage(PyObject* callable, int stage, bool is_last, bool unpacks)
    : callable_(Py_NewRef(callable)), stage_(stage), is_last_(is_last), unpacks_(unpacks) {}

PythonStage::~PythonStage() {
  if (Py_IsInitialized() == 0) return;
  const WithGil gil;
  Py_DECREF(callable_);
  step_.reset();
}

void PythonStage::set_step(std::shared_ptr<PythonStep> step, int num_microbatches) {
  step_ = std::move(step);
  if (step_ != nullptr) inside_ = "";  // else it is asked for yet
  losses_ = step_ != nullptr && is_last_ ? list_of_none(num_microbatches) : nullptr;
  metrics_ =
      losses_ != nullptr && step_->metrics != nullptr ? list_of_none(num_microbatches) : nullptr;
}

void PythonStage::forward(const StageContext& context, Message* input, StageOutput& output) {
  const WithGil gil;
  THPObjectPtr value(call(context.microbatch, input));
  if (is_last_) {
    if (step_->loss_fn != nullptr) take_loss(context.microbatch, value.get(), output);
    if (step_->outputs != nullptr) {
      put(step_->outputs.get(), context.microbatch, detached(std::move(value)));
    }
    return;
  }
  std::vector<Slot> slots;
  encode_value(value.get(), "output", output.structure, slots);
  for (const Slot& slot : slots) output.add(slot.tensor);
}

PyObject* PythonStage::call(int microbatch, Message* input) {
  PyObject* keywords = keywords_of(microbatch);
  THPObjectPtr value;
  if (input == nullptr) {
    value = Py_NewRef(item_of(step_->arguments.get(), microbatch));
  } else {
    value = decode_value(input->structure, input->slots);
    input->slots.clear();
  }
  PyObject* single = value.get();
  PyObject* const* arguments = &single;
  size_t num_arguments = 1;
  if (PyTuple_CheckExact(single) && (input == nullptr || unpacks_)) {
    arguments = reinterpret_cast<PyTupleObject*>(single)->ob_item;
    num_arguments = static_cast<size_t>(PyTuple_GET_SIZE(single));
  }
  return checked(PyObject_VectorcallDict(callable_, arguments, num_arguments, keywords));
}

// Borrowed, or null.
PyObject* PythonStage::keywords_of(int microbatch) const {
  if (step_->keywords == nullptr) return nullptr;
  PyObject* of_stage = PyDict_GetItemWithError(
      step_->keywords.get(), THPObjectPtr(checked(PyLong_FromLong(stage_))).get());
  if (of_stage == nullptr) {
    if (PyErr_Occurred() != nullptr) throw_python_error();
    return nullptr;
  }
  return item_of(of_stage, microbatch);
}

void PythonStage::take_loss(int microbatch, PyObject* value, StageOutput& output) {
  PyObject* const arguments[] = {value, item_of(step_->targets.get(), microbatch)};
  inside_ = arguments[1] == Py_None ? "loss_fn (target= was not given on this rank)" : "loss_fn";
  THPObjectPtr loss(checked(PyObject_Vectorcall(step_->loss_fn.get(), arguments, 2, nullptr)));
  const bool is_tensor = THPVariable_Check(loss.get());
  PYDIST_CHECK(is_tensor && THPVariable_Unpack(loss.get()).numel() == 1, UsageError,
               "loss_fn returned ",
               is_tensor ? concat("a tensor of shape ", THPVariable_Unpack(loss.get()).sizes())
                         : type_name(Py_TYPE(loss.get())),
               "; expected a tensor with one element, such as a mean or a sum gives");
  output.add(THPVariable_Unpack(loss.get()));
  put(losses_.get(), microbatch, THPVariable_Wrap(output.slots.back().tensor));
  inside_ = "";
  if (metrics_ == nullptr) return;
  inside_ = "metrics";
  const at::AutoGradMode no_grad(false);
  put(metrics_.get(), microbatch,
      checked(PyObject_Vectorcall(step_->metrics.get(), arguments, 2, nullptr)));
  inside_ = "";
}

Message PythonStage::result() {
  const WithGil gil;
  PyObject* metrics = metrics_ != nullptr ? metrics_.get() : Py_None;
  PyObject* const arguments[] = {losses_.get(), metrics};
  THPObjectPtr value(checked(PyObject_Vectorcall(step_->finish.get(), arguments, 2, nullptr)));
  Message message{{MessageKind::kResult}};
  encode_value(value.get(), "the result of the step", message.structure, message.slots);
  return message;
}

}  // namespace pydist
