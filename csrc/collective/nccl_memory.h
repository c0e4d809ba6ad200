// Memory of a communicator that peers may reach directly, freed once the device is past its use.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "base/device_handles.h"
#include "collective/nccl_watch.h"

namespace pydist {

class NcclMemory {
 public:
  NcclMemory(NcclWatch& watch, Stream stream) : watch_(watch), stream_(stream) {}

  struct Block {
    void* data = nullptr;
    bool is_nccls = false;          // else the runtime's
    nccl::Window window = nullptr;  // null where nothing is registered
  };

  // Collective: whether blocks are registered, which needs NCCL 2.27 on all ranks.
  void agree();
  bool is_registering() const { return is_registering_; }

  // Zeroed in the order of the communicator's stream. Collective where is_registering().
  Block allocate(size_t nbytes);
  // Not zeroed, not registered, never collective; at any time.
  static Block allocate_scratch(size_t nbytes);
  // The block is free when what is enqueued now, here and on the caller's current stream, is done.
  void release(const Block& block) noexcept;
  // Frees what can be freed by now; nothing while a graph is captured. True if nothing is left.
  // Waits for the whole device, other communicators too, so that no step may call it.
  bool sweep();

 private:
  struct Released {
    Block block;
    bool is_recorded = false;  // events cannot be recorded while a graph is captured
    OwnedEvent here = {};
    OwnedEvent there = {};
  };
  bool agree_on(bool mine, const char* what);
  Block allocate_registered(size_t nbytes);
  bool is_capturing() const;
  bool is_past(Released& released);
  void free(const Block& block);

  NcclWatch& watch_;
  const Stream stream_;
  bool is_registering_ = false;
  uint64_t num_ballots_ = 0;
  std::mutex mutex_;
  std::vector<Released> released_;  // guarded by mutex_
};

}  // namespace pydist
