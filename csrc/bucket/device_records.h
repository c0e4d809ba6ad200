// Ranks' records of their rounds, exchanged over a device: nothing waits for them unless asked to.
//
//   pinned ──copy──> device ──all-gather──> device ──copy──> pinned, read when that is complete
//
// What a graph captures is sent again by each of its launches, with the same words, and read by
// nobody.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "bucket/round.h"
#include "collective/nccl_communicator.h"

namespace pydist {

// With the communicator's device as the current one.
class DeviceRecords {
 public:
  DeviceRecords(std::shared_ptr<NcclCommunicator> communicator, int num_parameters);
  // Waits a while for what is under way, and leaves the memory alone where that does not end.
  ~DeviceRecords();
  DeviceRecords(const DeviceRecords&) = delete;
  DeviceRecords& operator=(const DeviceRecords&) = delete;

  // Collective.
  void send(const RoundRecord& mine);
  // Everybody's, of what was sent last. Waits.
  const std::vector<RoundRecord>& wait();
  // Everybody's, of the oldest that has not been read, if it is there; else null.
  const std::vector<RoundRecord>* poll();

 private:
  // This rank's words, then those of all ranks.
  struct Slot {
    uint64_t* pinned = nullptr;
    uint64_t* device = nullptr;
    uint64_t mark = 0;
    OwnedEvent received;
  };

  Slot take_slot();
  const std::vector<RoundRecord>& read(Slot slot);
  bool wait_for_all() const;

  std::shared_ptr<NcclCommunicator> communicator_;
  size_t num_words_;  // of one rank
  std::vector<RoundRecord> records_;
  std::deque<Slot> pending_;  // sent and not read, the oldest first
  std::vector<Slot> free_;
  std::vector<Slot> captured_;
};

}  // namespace pydist
