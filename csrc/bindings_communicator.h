// What the bindings of collectives and of messages share.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>
#include <utility>

#include "backend/tensor_buffer.h"
#include "collective/communicator.h"

namespace pydist {

using SharedCommunicator = std::shared_ptr<Communicator>;
using CommunicatorClass = pybind11::class_<Communicator, SharedCommunicator>;

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

void bind_messages(CommunicatorClass& communicator);

}  // namespace pydist
