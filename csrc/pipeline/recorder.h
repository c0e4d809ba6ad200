// When each action of a step ran, and how long it waited for others. Off unless asked for.
//
// Times are the host's: on a device an action ends when its work is enqueued, unless the recorder
// is told to wait for the device then, as to choose a schedule.
#pragma once

#include <cstdint>
#include <vector>

#include "base/clock.h"
#include "pipeline/action.h"

namespace pydist {

// On the monotonic clock, which the ranks of one machine share.
struct ActionRecord {
  Action action;
  int64_t start_ns = 0;
  int64_t end_ns = 0;   // everything it gives has been sent
  int64_t wait_ns = 0;  // of that, for messages
};

class Recorder {
 public:
  void switch_on(bool on, bool waits_for_device = false) {
    on_ = on;
    waits_for_device_ = on && waits_for_device;
  }
  bool is_on() const { return on_; }
  // Of the last step.
  const std::vector<ActionRecord>& records() const { return records_; }

  void begin_step() { records_.clear(); }
  void begin(const Action& action) {
    if (on_) records_.push_back({action, monotonic_ns()});
  }
  void end() {
    if (waits_for_device_) wait_for_device();
    if (on_) records_.back().end_ns = monotonic_ns();
  }
  // Runs `wait`, for the action that is going on.
  template <class Wait>
  auto waiting(Wait wait) {
    const int64_t start_ns = on_ ? monotonic_ns() : 0;
    auto result = wait();
    if (waits_for_device_) wait_for_device();  // which receives what the host knows of already
    if (on_ && !records_.empty()) records_.back().wait_ns += monotonic_ns() - start_ns;
    return result;
  }

 private:
  static void wait_for_device();

  bool on_ = false;
  bool waits_for_device_ = false;
  std::vector<ActionRecord> records_;
};

}  // namespace pydist
