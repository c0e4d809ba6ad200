// Vector clocks: what is known to have happened before what, whatever the order of execution.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace pydist::emulation {

// A place in the history of one participant: a stream, or the host.
struct Epoch {
  size_t participant = 0;
  uint64_t tick = 0;
};

class Clock {
 public:
  void join(const Clock& other) {
    if (ticks_.size() < other.ticks_.size()) ticks_.resize(other.ticks_.size());
    for (size_t i = 0; i < other.ticks_.size(); ++i) {
      ticks_[i] = std::max(ticks_[i], other.ticks_[i]);
    }
  }
  Epoch advance(size_t participant) {
    if (ticks_.size() <= participant) ticks_.resize(participant + 1);
    return {participant, ++ticks_[participant]};
  }
  bool covers(Epoch epoch) const {
    return epoch.participant < ticks_.size() && ticks_[epoch.participant] >= epoch.tick;
  }

 private:
  std::vector<uint64_t> ticks_;
};

// Something that touched memory: what it is for messages, and when it happened.
struct Deed {
  std::string what;
  Epoch epoch;
  Clock clock;  // covers everything that comes before it, and itself

  bool is_before(const Deed& other) const { return other.clock.covers(epoch); }
};
using DeedPointer = std::shared_ptr<const Deed>;

}  // namespace pydist::emulation
