// A barrier that finds out who does not come, made of messages with tags of its own.
//
// Rank 0 hears from every rank, then answers all that came: that all did, or who did not. Barriers
// are numbered by each rank's calls. A receive that was waited for in vain stays posted for the
// rank's next barrier, so that what comes late is recognised by its number.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "collective/request.h"

namespace pydist {

class Communicator;

class MonitoredBarrier {
 public:
  // Raises TimeoutError where ranks do not come within timeout_s, on every rank that came.
  void run(Communicator& communicator, double timeout_s, bool wait_all_ranks);

 private:
  // Of rank 0: `problem` is empty if all came.
  struct Note {
    uint64_t number = 0;
    std::array<char, 1016> problem{};
  };
  // A note that a peer is to send, and its receive if one is posted.
  struct Expected {
    std::shared_ptr<Note> note = std::make_shared<Note>();
    std::shared_ptr<Request> request;
  };

  void collect(Communicator& communicator, double timeout_s, bool wait_all_ranks);
  void report(Communicator& communicator, double timeout_s);
  bool await_note(Communicator& communicator, int from, double deadline_s);
  void send_note(Communicator& communicator, int to, uint64_t number, const std::string& problem);

  std::mutex mutex_;  // one barrier at a time
  uint64_t number_ = 0;
  std::vector<Expected> expected_;  // by rank
};

}  // namespace pydist
