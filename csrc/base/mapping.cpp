#include "base/mapping.h"

#include <sys/mman.h>

#include "base/check.h"
#include "base/fork.h"

namespace pydist {

Mapping::Mapping(int fd, size_t nbytes, ForkBehavior fork_behavior) : nbytes_(nbytes) {
  void* address =
      ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (address == MAP_FAILED) {
    PYDIST_CHECK_SYSTEM(-1, "cannot map ", nbytes,
                        " bytes of shared memory (raise `ulimit -v` if it is set)");
  }
  data_ = static_cast<uint8_t*>(address);
  if (fork_behavior == ForkBehavior::kHide) {
    watch_forks();
    hidden_in_child_ = true;
    ::madvise(address, nbytes, MADV_DONTFORK);
  }
}

Mapping::~Mapping() {
  // A hidden mapping does not exist in a child: something else may lie at its address there.
  if (data_ != nullptr && !(hidden_in_child_ && in_forked_child())) ::munmap(data_, nbytes_);
}

}  // namespace pydist
