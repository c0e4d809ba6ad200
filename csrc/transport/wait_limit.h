// A time limit of one thread's waits, instead of a board's.
#pragma once

namespace pydist {

// While one lives, waits that this thread begins on a board end after so many seconds.
class WaitLimit {
 public:
  explicit WaitLimit(double timeout_s) : outer_s_(current_s_) { current_s_ = timeout_s; }
  ~WaitLimit() { current_s_ = outer_s_; }
  WaitLimit(const WaitLimit&) = delete;

  static double or_else(double timeout_s) { return current_s_ > 0 ? current_s_ : timeout_s; }

 private:
  static inline thread_local double current_s_ = 0;  // 0: none
  const double outer_s_;
};

}  // namespace pydist
