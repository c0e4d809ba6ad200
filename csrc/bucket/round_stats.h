// Where the time of steps goes, and which rank the others wait for. No torch.
//
//   one rank:  forward ... | backward ............ | waiting ... | reducing ... | (optimizer, data)
//              begin_forward open                  close         meet           finish
//
// All ranks leave Round::end() together, at `meet`, so the time from there to a rank's next call of
// end() compares across ranks although their clocks do not: that is `busy`, which ranks exchange.
// Whoever was busy longest came last, and the others waited for the difference.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace pydist {

// Sums over the rounds so far.
struct StepTimes {
  int64_t forward_ns = 0;
  int64_t backward_ns = 0;
  int64_t waiting_ns = 0;   // at the end of backward, for the rank that came last
  int64_t reducing_ns = 0;  // after it, for what was not yet reduced
  int64_t total_ns = 0;     // from the end of a round to the end of the next
};

// When the last round did what, on the monotonic clock.
struct RoundTimes {
  int64_t forward_ns = 0;       // the forward that it belongs to began
  int64_t backward_ns = 0;      // it opened
  int64_t published_ns = 0;     // its first unit was published
  int64_t backward_end_ns = 0;  // all gradients were there
  int64_t finished_ns = 0;      // all means were there
};

struct Lateness {
  uint64_t num_last = 0;  // rounds in which this rank came last
  int64_t waited_ns = 0;  // that the others waited for it then, as a mean over them
};

class RoundStats {
 public:
  explicit RoundStats(int size) : late_(size) {}

  void begin_forward(int64_t now_ns) {
    forward_begin_ns_ = now_ns;
    if (step_begin_ns_ == 0) step_begin_ns_ = now_ns;
  }
  void end_forward(int64_t now_ns) { forward_ns_ += now_ns - forward_begin_ns_; }
  // Time in which this rank waited for others elsewhere; it was not busy then.
  void discount(int64_t waited_ns) { discounted_ns_ += waited_ns; }
  void open(int64_t now_ns) {
    now_ = {forward_begin_ns_, now_ns, 0, 0, 0};
    if (step_begin_ns_ == 0) step_begin_ns_ = now_ns;
  }
  void publish(int64_t now_ns) {
    if (now_.published_ns == 0) now_.published_ns = now_ns;
  }
  bool published() const { return now_.published_ns != 0; }
  void close(int64_t now_ns) { now_.backward_end_ns = now_ns; }
  // At the call of end(); 0 in the first round, which has nothing to count from.
  int64_t busy_ns(int64_t now_ns) const {
    return met_ns_ == 0 ? 0 : now_ns - met_ns_ - discounted_ns_;
  }
  // All ranks have met, with these busy times.
  void meet(int64_t now_ns, int rank, const std::vector<int64_t>& busy_ns);
  void finish(int64_t now_ns);

  const StepTimes& times() const { return times_; }
  const RoundTimes& last_round() const { return last_; }
  const std::vector<Lateness>& late() const { return late_; }

 private:
  void count_late(const std::vector<int64_t>& busy_ns, size_t last);

  StepTimes times_;
  RoundTimes now_;   // of the round that goes on
  RoundTimes last_;  // of the one before
  std::vector<Lateness> late_;
  int64_t forward_begin_ns_ = 0;
  int64_t forward_ns_ = 0;     // since the last round
  int64_t discounted_ns_ = 0;  // since ranks met
  int64_t met_ns_ = 0;
  int64_t waited_ns_ = 0;  // in this round
  int64_t step_begin_ns_ = 0;
};

}  // namespace pydist
