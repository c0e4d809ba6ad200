// What the bindings of collectives and of messages share.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>
#include <utility>

#include "collective/communicator.h"

namespace pydist {

using SharedCommunicator = std::shared_ptr<Communicator>;
using CommunicatorClass = pybind11::class_<Communicator, SharedCommunicator>;

enum class Arithmetic { kNeeded, kNone };

// The memory of a tensor. Types that the kernels do not know are bytes to operations that only move
// them. Raises UsageError for what is not contiguous or not on the CPU.
Buffer contiguous_buffer(const at::Tensor& tensor, Arithmetic arithmetic);

// An operation in flight; keeps the communicator, so that it outlives its operations.
class PyRequest {
 public:
  PyRequest(SharedCommunicator communicator, std::shared_ptr<Request> request)
      : communicator_(std::move(communicator)), request_(std::move(request)) {}

  bool test() const { return request_->test(); }
  void wait() const { request_->wait(); }
  int source() const { return request_->test() ? request_->source() : -1; }
  std::string description() const { return request_->description(); }

 private:
  SharedCommunicator communicator_;
  std::shared_ptr<Request> request_;
};

void bind_arena(pybind11::module_& module);
void bind_messages(CommunicatorClass& communicator);

}  // namespace pydist
