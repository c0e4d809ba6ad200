// When each action of a step ran, and how long it waited for others. Off unless asked for.
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
  void switch_on(bool on) { on_ = on; }
  bool is_on() const { return on_; }
  // Of the last step.
  const std::vector<ActionRecord>& records() const { return records_; }

  void begin_step() { records_.clear(); }
  void begin(const Action& action) {
    if (on_) records_.push_back({action, monotonic_ns()});
  }
  void end() {
    if (on_) records_.back().end_ns = monotonic_ns();
  }
  // Runs `wait`, for the action that is going on.
  template <class Wait>
  auto waiting(Wait wait) {
    const int64_t start_ns = on_ ? monotonic_ns() : 0;
    auto result = wait();
    if (on_ && !records_.empty()) records_.back().wait_ns += monotonic_ns() - start_ns;
    return result;
  }

 private:
  bool on_ = false;
  std::vector<ActionRecord> records_;
};

}  // namespace pydist
