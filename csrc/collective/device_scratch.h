// Memory that the collectives of one communicator work in, one after the other in its stream.
#pragma once

#include <memory>
#include <vector>

#include "collective/nccl_communicator.h"

namespace pydist {

class DeviceScratch {
 public:
  explicit DeviceScratch(std::shared_ptr<NcclCommunicator> communicator)
      : communicator_(std::move(communicator)) {}

  // At least so many bytes, aligned to 512, with whatever was left there; the next call may give
  // the same. Where it has to grow, it doubles. Nothing is freed before the end: a captured graph
  // may go on using it. So at most four times the largest demand is held. It is this rank's own, so
  // that nobody is waited for: a mean may begin in a backward that others answer from elsewhere.
  uint8_t* reserve(size_t nbytes);

 private:
  std::shared_ptr<NcclCommunicator> communicator_;
  std::vector<std::shared_ptr<void>> memory_;  // the last is in use
  size_t nbytes_ = 0;                          // of the last
};

}  // namespace pydist
