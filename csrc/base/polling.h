// How to wait for what can only be asked: yields at first, then sleeps between looks. No wait of
// the engine's own memory is one; see Board::wait().
#pragma once

#include <sched.h>
#include <unistd.h>

#include "base/clock.h"

namespace pydist {

class Polling {
 public:
  // `sleep_us` is the pause between looks once yielding has not helped.
  explicit Polling(useconds_t sleep_us) : sleep_us_(sleep_us) {}

  // Pauses until the next look. True ten times a second: then signals, peers and the time limit
  // want to be looked at too.
  bool pause() {
    const double now_s = monotonic_s();
    if (now_s - start_s_ < kYield_s) {
      ::sched_yield();
    } else {
      ::usleep(sleep_us_);
    }
    if (now_s < next_check_s_) return false;
    next_check_s_ = now_s + kCheck_s;
    return true;
  }

  double waited_s() const { return monotonic_s() - start_s_; }

 private:
  static constexpr double kYield_s = 1e-3;
  static constexpr double kCheck_s = 0.1;

  useconds_t sleep_us_;
  double start_s_ = monotonic_s();
  double next_check_s_ = start_s_ + kCheck_s;
};

}  // namespace pydist
