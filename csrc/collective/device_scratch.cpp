// Growth of scratch memory.
#include "collective/device_scratch.h"

#include <algorithm>

#include "base/check.h"

namespace pydist {

uint8_t* DeviceScratch::reserve(size_t nbytes, const std::string& what) {
  if (nbytes > nbytes_) {
    PYDIST_CHECK(!device_runtime()->is_capturing(communicator_->stream()), UsageError, what,
                 " needs ", nbytes, " bytes of scratch memory and has ", nbytes_,
                 ", which cannot grow while a CUDA graph is captured; run one step like the "
                 "captured one before");
    const size_t grown = std::max(nbytes, 2 * nbytes_);
    memory_.push_back(communicator_->allocate(grown));
    nbytes_ = grown;
  }
  return memory_.empty() ? nullptr : static_cast<uint8_t*>(memory_.back().get());
}

}  // namespace pydist
