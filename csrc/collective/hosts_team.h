// What the parts of a HostsCommunicator share: who is where, the ways to the others, how to wait.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "collective/hosts_plan.h"
#include "collective/network.h"
#include "collective/shm_communicator.h"

namespace pydist {

// Memory that a network may keep.
SharedBytes make_shared_bytes(size_t nbytes);

// The same for use again: operations follow each other, and leave nothing under way, unless the
// group has failed.
class HostsMemory {
 public:
  // Of the meeting, and of what follows. Segment i of those under way has kSent + 2 * i and
  // kReceived + 2 * i.
  enum Run : size_t { kMeetingSent, kMeetingReceived, kSent, kReceived };

  // At least so long, with anything in it.
  SharedBytes take(size_t run, size_t nbytes);

 private:
  // More than any segment needs. What is longer lasts as long as its operation.
  static constexpr size_t kMaxKeptNbytes = size_t{16} << 20;
  struct Kept {
    SharedBytes bytes;
    size_t nbytes = 0;
  };
  std::vector<Kept> runs_;
};

struct HostsTeam {
  HostLayout layout;
  int rank = 0;
  std::shared_ptr<ShmCommunicator> local;  // the ranks of this host
  std::shared_ptr<Network> lane;           // this rank's; its ranks are hosts. Null: it has none
  std::shared_ptr<Network> flat;           // of all ranks; may be null where only sums are needed
  double timeout_s = 1800;                 // of waits for other hosts
  std::shared_ptr<HostsMemory> memory = std::make_shared<HostsMemory>();

  int host() const { return layout.host_of(rank); }
  int local_rank() const { return layout.local_of(rank); }
  Board& board() const { return local->board(); }

  // Waits for an exchange. Raises NetworkError, PeerError where the board has failed, TimeoutError,
  // and what a signal handler raises.
  void await(Exchange& exchange, const std::function<std::string()>& operation) const;
  // Every rank's `nbytes` (the same on all), in rank order: among the ranks of each host, then
  // between hosts by lane 0, then back.
  void gather_all(const void* mine, size_t nbytes, uint8_t* all,
                  const std::function<std::string()>& operation) const;
};

}  // namespace pydist
