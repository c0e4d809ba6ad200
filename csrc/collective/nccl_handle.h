// One communicator of NCCL: its calls, one at a time; its set-up; its end.
//
// NCCL's calls are nonblocking: each goes on in a thread of NCCL's, which enqueues it (and connects
// to peers first, where it must), and until then the next call has to wait: state() tells.
#pragma once

#include <atomic>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "collective/nccl_communicator.h"
#include "transport/nccl_api.h"

namespace pydist {

class NcclHandle {
 public:
  NcclHandle(const nccl::Api& api, int device) : api_(api), device_(device) {}
  ~NcclHandle() { abort(); }
  NcclHandle(const NcclHandle&) = delete;
  NcclHandle& operator=(const NcclHandle&) = delete;

  const nccl::Api& api() const { return api_; }

  // Begins set-up; over once state() is not kInProgress.
  nccl::Result begin(const nccl::UniqueId& id, const NcclOptions& options);

  // call(comm) -> Result, unless the communicator has ended: then kInvalidUsage.
  template <class Call>
  nccl::Result run(Call&& call) {
    const std::lock_guard<std::timed_mutex> lock(mutex_);
    const nccl::Comm comm = comm_.load(std::memory_order_relaxed);
    return comm == nullptr ? nccl::kInvalidUsage : call(comm);
  }
  // kInProgress, kSuccess, or what has gone wrong, now or earlier.
  nccl::Result state();
  // The same; nothing before begin(), after the end, and where a call is being made just now.
  std::optional<nccl::Result> state_if_free();
  // NCCL's words for a result, and for what happened last.
  std::string explain(nccl::Result result);

  // Ends what is under way on the device. Returns at once; every later run() is refused.
  void abort() noexcept;
  // Ends a communicator whose work on this rank is done: when the others have done the same, which
  // nobody waits for here. So they may be ended in any order, also one that graphs still use.
  void finish() noexcept;

 private:
  nccl::Comm take() noexcept;
  nccl::Result state_locked();

  const nccl::Api& api_;
  const int device_;
  std::timed_mutex mutex_;
  std::atomic<nccl::Comm> comm_{nullptr};  // changed under the mutex, but for take()'s last resort
};

// The process is about to leave: gives the ends under way that long, and stops them then.
void stop_ending_nccl(double timeout_s);

}  // namespace pydist
