// What the ranks of an NCCL communicator tell each other through the Store: that they have come,
// the unique id, what has failed, and how far they are.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "collective/nccl_signs.h"
#include "transport/nccl_api.h"
#include "transport/store.h"

namespace pydist {

struct NcclFailure {
  enum class Kind : char { kPeer = 'P', kTimeout = 'T', kOwn = 'O' };
  Kind kind = Kind::kPeer;
  std::string text = {};
};

class NcclMeeting {
 public:
  NcclMeeting(std::unique_ptr<Store> store, int rank, int size, std::vector<int> global_ranks);

  // All of these may raise the Store's errors, but describe() and has_ended().
  void arrive();
  bool all_arrived();
  std::string missing();  // "rank 2, rank 3"
  void publish_id(const nccl::UniqueId& id);
  std::optional<nccl::UniqueId> find_id();

  // The first failure stays.
  void tell(const NcclFailure& failure);
  // Wants a sign of everybody.
  void ask();
  struct News {
    bool is_asked = false;
    std::optional<NcclFailure> failure = {};
  };
  News news();  // one request while there is none
  void give(const Sign& sign);
  std::optional<Sign> sign_of(int rank);

  // True once all ranks have voted on the `ballot`-th question with yes, nothing before all voted.
  void vote(uint64_t ballot, bool yes);
  std::optional<bool> outcome(uint64_t ballot);

  // "rank 1 (pid 1234)"; without the pid until all ranks have come.
  std::string describe(int rank);
  // True where the rank's process was on this host and is gone.
  bool has_ended(int rank);

 private:
  struct Process {
    int64_t pid = 0;
    uint64_t start_time = 0;
    std::string host = {};
  };
  static Process this_process();
  const Process* process_of(int rank);

  const std::unique_ptr<Store> store_;
  const int rank_;
  const int size_;
  const std::vector<int> global_ranks_;
  const Process me_;
  std::atomic<bool> have_arrived_{false};
  std::mutex mutex_;
  std::vector<std::optional<Process>> processes_;  // guarded by mutex_; what is known of the ranks
};

}  // namespace pydist
