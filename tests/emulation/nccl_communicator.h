// A communicator of the emulated NCCL, as its handle points to. Never freed, so that a use after
// its end is found.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/error.h"
#include "clock.h"
#include "graph.h"
#include "nccl_segment.h"
#include "transport/nccl_api.h"

namespace pydist::emulation {

// What ncclRedOpCreatePreMulSum makes.
struct PreMulSum {
  bool is_destroyed = false;
  nccl::DataType dtype = nccl::kFloat32;
  const void* device_scalar = nullptr;
  double value = 1;
};

enum class State { kInitializing, kReady, kFinalizing, kFinalized, kDestroyed, kAborted };

struct CommState {
  int number = 0;
  int rank = 0;
  int size = 0;
  bool is_blocking = true;
  SegmentName name = {};
  std::shared_ptr<Segment> segment;

  std::mutex mutex;  // of what follows; of the host's threads
  State state = State::kInitializing;
  std::vector<PreMulSum> operators;
  std::map<void*, size_t> windows;
  std::string last_error;
  Clock clock;  // of what was enqueued
  // What a call that returned ncclInProgress still has to do: tried at polls of the state.
  std::function<bool()> pending;
  std::string pending_what;
  StreamState* pending_on = nullptr;  // where it will be enqueued, if it will
  bool is_polled = false;             // by a thread, just now
  int polls_left = 0;                 // before it is tried at all
  uint64_t num_calls = 0;
  bool is_counted_finalizing = false;

  std::mutex stepping;  // held while the device's thread works on it
  std::atomic<bool> is_aborted{false};
  std::atomic<int> num_pending{0};
  std::atomic<int> async_error{0};
  // Of the device's thread.
  uint64_t num_chunks = 0;
  std::vector<uint64_t> num_sent;  // packets, by peer
  std::vector<uint64_t> num_received;

  // "communicator 3 (rank 1 of 2)"
  std::string describe() const {
    return concat("communicator ", number, " (rank ", rank, " of ", size, ")");
  }
};

}  // namespace pydist::emulation
