// What a communicator has carried out so far; read while it goes on.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "collective/communicator.h"

namespace pydist {

class CallCounter {
 public:
  void add(size_t nbytes) {
    calls_.fetch_add(1, std::memory_order_relaxed);
    nbytes_.fetch_add(nbytes, std::memory_order_relaxed);
  }
  OperationCount read() const {
    return {calls_.load(std::memory_order_relaxed), nbytes_.load(std::memory_order_relaxed)};
  }

 private:
  std::atomic<uint64_t> calls_{0};
  std::atomic<uint64_t> nbytes_{0};
};

// Of this rank, by Operation.
class CallCounters {
 public:
  void add(const Collective& collective);
  void read(CommunicatorCounts& counts) const {
    for (size_t k = 0; k < kNumOperations; ++k) counts.collectives[k] = counters_[k].read();
  }

 private:
  std::array<CallCounter, kNumOperations> counters_;
};

}  // namespace pydist
