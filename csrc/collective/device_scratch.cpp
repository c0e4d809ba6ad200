// Growth of scratch memory.
#include "collective/device_scratch.h"

#include <algorithm>

namespace pydist {

uint8_t* DeviceScratch::reserve(size_t nbytes) {
  if (nbytes > nbytes_) {
    const size_t grown = std::max(nbytes, 2 * nbytes_);
    memory_.push_back(communicator_->allocate_scratch(grown));
    nbytes_ = grown;
  }
  return memory_.empty() ? nullptr : static_cast<uint8_t*>(memory_.back().get());
}

}  // namespace pydist
