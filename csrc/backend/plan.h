// One call of the backend: what the engine is asked for, and the tensors it is asked with.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

#include "backend/tensor_buffer.h"
#include "collective/communicator.h"

namespace pydist {

// The engine takes contiguous memory. Tensors that are not, and views that only note a conjugate or
// a sign, have stand-ins while the operation runs.
class Plan {
 public:
  // `title` is the profiler's name of the operation.
  Plan(c10d::OpType type, const char* title) : type(type), title(title) {}

  // The tensor's values.
  Buffer read(const at::Tensor& tensor, Arithmetic arithmetic = Arithmetic::kNone);
  // The tensor's memory, or that of a stand-in with its values, which are copied back at the end.
  Buffer write(const at::Tensor& tensor, Arithmetic arithmetic = Arithmetic::kNone);
  // The same where all of it will be written: a stand-in need not have its values.
  Buffer write_whole(const at::Tensor& tensor) { return write_all({tensor}); }
  // The values of tensors of one type, one after the other.
  Buffer read_all(const std::vector<at::Tensor>& tensors,
                  Arithmetic arithmetic = Arithmetic::kNone);
  // Memory for tensors of one type, one after the other, without their values: their own if it is
  // like that, else a stand-in's.
  Buffer write_all(const std::vector<at::Tensor>& tensors);
  // The same values in memory of its own.
  at::Tensor copy_of_all(const std::vector<at::Tensor>& tensors);
  // `tensor` gets the values of `source` at the end.
  void copy_later(const at::Tensor& tensor, const at::Tensor& source);
  // Memory stays until the work is gone.
  void keep(const at::Tensor& tensor) { kept_.push_back(tensor); }

  void forget_copies() { copies_.clear(); }
  // After the copies.
  void do_later(std::function<void()> action) { later_ = std::move(action); }
  // After the steps have ended well.
  void copy_back();

  const c10d::OpType type;
  const char* const title;
  std::vector<Collective> steps;
  std::vector<at::Tensor> inputs;   // for the profiler
  std::vector<at::Tensor> outputs;  // the value of the work's future

 private:
  std::vector<at::Tensor> kept_;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;  // target, source
  std::function<void()> later_ = nullptr;
};

}  // namespace pydist
