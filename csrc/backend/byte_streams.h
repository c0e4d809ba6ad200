// Runs of bytes between the ranks of a process group, in order per pair; the threads that wait for
// them.
#pragma once

#include <ATen/core/Tensor.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

namespace pydist {

class ByteStreams {
 public:
  // How long a run is, from its first block.
  using Measure = std::function<size_t(const uint8_t* block)>;
  struct Arrived {
    int source = 0;
    at::Tensor bytes = {};
  };

  // A run starts with a block of `block_nbytes`, the same on all ranks.
  ByteStreams(c10::intrusive_ptr<c10d::ProcessGroup> group, size_t block_nbytes, Measure measure);
  // Gives up what is on its way.
  ~ByteStreams();
  ByteStreams(const ByteStreams&) = delete;

  // Memory for a run of this size, at least a block.
  at::Tensor make_run(size_t nbytes) const;
  void send(int destination, at::Tensor run);
  // The first rank that a run is still on its way to, or -1.
  int sending_to();
  // What has arrived since the last call.
  std::vector<Arrived> take();
  // Why nothing comes from, or goes to, this rank any more; empty while it may.
  std::string lost(int peer);
  // The rank that was lost before all others (which may have left for that), or -1.
  int first_lost();

  // Changes with everything that take(), sending_to() and lost() tell of.
  uint64_t num_events();
  // Returns once it is another than `seen`, or after some time.
  void wait_for_event(uint64_t seen, double at_most_s);

 private:
  using Work = c10::intrusive_ptr<c10d::Work>;
  struct Sent {
    int destination;
    at::Tensor run;
    std::vector<Work> works;
  };

  void receive_from(int source);
  void await_sends();
  bool receive(int source, at::Tensor into, int tag);
  void lose(int peer, const std::string& why);
  void add_event(const std::unique_lock<std::mutex>& lock);

  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const size_t block_nbytes_;
  const Measure measure_;
  std::mutex mutex_;  // of what follows
  std::condition_variable changed_;
  bool stopping_ = false;
  uint64_t num_events_ = 0;
  std::vector<Arrived> arrived_;
  std::deque<Sent> sent_;
  std::vector<std::string> lost_;  // by peer
  int first_lost_ = -1;
  std::vector<Work> waiting_;  // by source: what its thread waits for; last: the sends' thread
  std::vector<std::thread> threads_;
};

}  // namespace pydist
