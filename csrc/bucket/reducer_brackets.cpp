// Rounds that the caller brackets: it runs many backwards, of graphs whose outputs the reducer
// never saw, and knows which is the last. A pipeline's stage does, once a microbatch.
//
//   begin_backward(false) .. end_backward()   any number of times: gradients only accumulate
//   begin_backward(true)  .. end_backward()   the last: units are published as they become ready,
//                                             and at its end what is left; nobody waits
//   progress()                                at leisure: reduces what everybody has published
//   finish_round()                            waits; `.grad` are the means from here on
//
// Between the last two this rank may do anything else, other reducers' rounds included: a round
// that is published needs this rank no more, for its peers can reduce it.
#include "base/check.h"
#include "base/clock.h"
#include "bucket/reducer.h"

namespace pydist {

void Reducer::begin_backward(bool last) {
  failing_together([&] {
    if (!last || !reduces()) {
      only_local_ = !open_;
    } else {
      PYDIST_CHECK(!open_, UsageError, "a round of ", options_.name,
                   " is going on; finish_round() has to end it before the next begins");
      begin_round(divisor_);
      by_output_ = true;  // the backwards from it on to the round before tell who uses what
    }
    arm();
  });
}

void Reducer::end_backward() {
  expected_.disarm();
  only_local_ = false;
  if (!open_) return;
  failing_together([&] {
    // What an earlier backward used is averaged in any case, so it need not wait for the agreement.
    publish_missing(round_->publishes_all() ? nullptr : &record_.used);
    stats_.close(monotonic_ns());
    round_->progress();
  });
}

void Reducer::progress() {
  if (!open_) return;
  failing_together([&] { round_->progress(); });
}

void Reducer::finish_round() {
  if (!open_) return;
  failing_together([&] {
    settle_round();
    // A peer that raised while it waited for us has given us all that we needed from it.
    round_->check_now();
  });
}

bool Reducer::has_failed() const {
  try {
    round_->check();
    return false;
  } catch (const PeerError&) {
    return true;
  }
}

void Reducer::give_up(const std::string& reason) noexcept {
  only_local_ = false;
  last_error_ = reason;
  drop_round(reason);
}

}  // namespace pydist
