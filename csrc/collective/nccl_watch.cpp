#include "collective/nccl_watch.h"

#include <algorithm>

#include "base/check.h"
#include "base/clock.h"
#include "base/fork.h"
#include "base/interrupt.h"
#include "base/polling.h"

namespace pydist {

namespace {

constexpr double kTick_s = 1;          // between looks while calls are through in less
constexpr double kSlowTick_s = 0.1;    // once one takes longer
constexpr double kForever_s = 1e6;     // there is nothing to look at
constexpr double kLongestIdle_s = 10;  // between looks at the Store while nothing is under way
constexpr double kOwnWords_s = 1;      // for a peer to say why, before NCCL's error is taken for it
constexpr useconds_t kHear_us = 50'000;
constexpr int kMaxStoreErrors = 10;  // in a row, while a call is slow
constexpr double kToldShare = 0.5;   // of the timeout: who waited that long has run into it too

}  // namespace

NcclWatch::NcclWatch(const nccl::Api& api, std::unique_ptr<Store> store, const NcclOptions& options)
    : options_(options),
      handle_(api, options.device),
      meeting_(std::move(store), options.rank, options.size, options.global_ranks) {}

// Also how soon a rank answers that others ask for a sign of life.
double NcclWatch::idle_s() const {
  return std::clamp(options_.timeout_s / 10, kSlowTick_s, kLongestIdle_s);
}

double NcclWatch::slow_s() const { return std::min(kTick_s, options_.timeout_s / 4); }

double NcclWatch::last_resort_s() const { return options_.timeout_s + 60 + 4 * idle_s(); }

void NcclWatch::check() {
  PYDIST_CHECK(!in_forked_child(), UsageError,
               "NCCL cannot be used in a forked child (a DataLoader "
               "worker, say): start the process with the spawn method");
  if (!has_failed()) return;
  std::string text = concat(options_.name, " has failed: ", failure_.text);
  if (!options_.remedy.empty()) text += ". " + options_.remedy;
  switch (failure_.kind) {
    case NcclFailure::Kind::kPeer:
      throw PeerError(text);
    case NcclFailure::Kind::kTimeout:
      throw TimeoutError(text);
    case NcclFailure::Kind::kOwn:
      break;
  }
  throw Error(text);
}

// The peers are told first, so that what they learn is the reason, and not NCCL's error about it.
void NcclWatch::fail(const NcclFailure& failure) noexcept {
  if (in_forked_child()) return;
  try {
    const std::lock_guard<std::mutex> lock(failure_mutex_);
    if (has_failed()) return;
    failure_ = failure;
    failed_.store(true, std::memory_order_release);
  } catch (...) {
  }
  try {
    meeting_.tell(failure);
  } catch (...) {  // the Store is gone; the peers see that, or NCCL's error
  }
  handle_.abort();
}

void NcclWatch::raise(nccl::Result result, const std::string& operation) {
  const bool by_peer = result == nccl::kRemoteError || result == nccl::kSystemError;
  const bool by_caller = result == nccl::kInvalidArgument || result == nccl::kInvalidUsage;
  if (!by_caller) hear_peers();
  check();
  const auto kind = by_peer ? NcclFailure::Kind::kPeer : NcclFailure::Kind::kOwn;
  fail({kind, concat(me(), ": ", handle_.explain(result), " (", operation, ")")});
  check();
  throw Error("unreachable");
}

// An error of NCCL's is often how the end of a peer reads here: gives it the time to say why.
void NcclWatch::hear_peers() {
  Polling polling(kHear_us);
  while (!has_failed() && polling.waited_s() < kOwnWords_s) {
    try {
      if (const auto failure = meeting_.news().failure) {
        return fail({NcclFailure::Kind::kPeer, failure->text});
      }
      look_for_ended(/*may_leave=*/false);
    } catch (const std::exception&) {  // the Store is gone: NCCL's words are all there is
      return;
    }
    polling.pause();
  }
}

void NcclWatch::await(const std::function<bool()>& is_done, useconds_t sleep_us, double limit_s,
                      const std::function<std::string()>& why_not) {
  Polling polling(sleep_us);
  while (!is_done()) {
    if (!polling.pause()) continue;
    try {
      check_interrupt();
    } catch (...) {
      fail({NcclFailure::Kind::kPeer, concat(me(), " was interrupted while it waited")});
      throw;
    }
    check();
    if (polling.waited_s() > limit_s) fail({NcclFailure::Kind::kTimeout, why_not()});
  }
}

// A sign stays behind, for those who wait for a call that will not come.
void NcclWatch::close() noexcept {
  const std::lock_guard<std::mutex> lock(look_mutex_);
  if (!has_failed() && options_.size > 1) {
    try {
      Sign last = sign();
      last.has_left = true;
      meeting_.give(last);
    } catch (const std::exception&) {  // the Store or the device is gone
    }
  }
  calls_.store(nullptr);
  is_closed_ = true;
}

double NcclWatch::look() noexcept {
  const std::lock_guard<std::mutex> lock(look_mutex_);
  if (is_closed_ || has_failed()) return kForever_s;
  try {
    return look_at_all();
  } catch (const std::exception& error) {
    fail({NcclFailure::Kind::kOwn, concat(me(), ": ", error.what())});
  } catch (...) {
    fail({NcclFailure::Kind::kOwn, me() + ": the watchdog failed"});
  }
  return kForever_s;
}

double NcclWatch::look_at_all() {
  device_runtime()->set_current_device(options_.device);  // for good: the watchdog's thread
  NcclCalls* calls = calls_.load();
  const double waited_s = calls == nullptr ? 0 : calls->waited_s();
  const double now_s = monotonic_s();
  const bool is_slow = waited_s > slow_s() || timed_out_.has_value();
  if (is_slow || is_urgent_.load()) {
    look_at_news(waited_s);
    look_for_ended(/*may_leave=*/false);
    look_at_state();
    look_at_time(now_s, waited_s);
    return kSlowTick_s;
  }
  if (now_s >= next_news_s_) {
    next_news_s_ = now_s + idle_s();
    look_at_news(waited_s);
    if (is_captured()) {
      look_for_ended(/*may_leave=*/true);
      look_at_state();
    }
  }
  return std::min({kTick_s, idle_s(), slow_s()});
}

void NcclWatch::look_at_state() {
  const std::optional<nccl::Result> state = handle_.state_if_free();
  if (!state || *state == nccl::kSuccess || *state == nccl::kInProgress) return;
  try {
    raise(*state, "while " + waiting_for());
  } catch (const Error&) {  // failed; the caller's next call raises it
  }
}

// A rank that may leave has done so where its last sign says that.
void NcclWatch::look_for_ended(bool may_leave) {
  for (int r = 0; r < options_.size && !has_failed(); ++r) {
    if (r == options_.rank || !meeting_.has_ended(r)) continue;
    if (may_leave && has_left(r)) continue;
    std::string text =
        concat(meeting_.describe(r), " has ended while ", me(), " waited for ", waiting_for());
    try {  // its last words may have come since the last look
      if (const auto told = meeting_.news().failure) text = told->text;
    } catch (const std::exception&) {  // it served the Store
    }
    fail({NcclFailure::Kind::kPeer, text});
  }
}

bool NcclWatch::has_left(int rank) {
  try {
    const std::optional<Sign> sign = meeting_.sign_of(rank);
    return sign && sign->has_left;
  } catch (const std::exception&) {  // it served the Store
    return false;
  }
}

void NcclWatch::look_at_news(double waited_s) {
  try {
    const NcclMeeting::News news = meeting_.news();
    num_store_errors_ = 0;
    heed(news, waited_s);
  } catch (const std::exception& error) {
    // Nobody waits: then its end is that of the job, most likely.
    if (waited_s < slow_s() || ++num_store_errors_ < kMaxStoreErrors) return;
    fail({NcclFailure::Kind::kPeer,
          concat("the Store that ranks meet through does not answer any more (", error.what(),
                 ") while ", me(), " waited for ", waiting_for(),
                 ": the process that serves it has ended, which is rank 0's or torchrun's")});
  }
}

void NcclWatch::heed(const NcclMeeting::News& news, double waited_s) {
  if (news.is_asked && !has_given_sign_) {
    has_given_sign_ = true;
    meeting_.give(sign());
  }
  if (!news.failure) return;
  NcclFailure failure = *news.failure;
  const bool timed_out = failure.kind == NcclFailure::Kind::kTimeout &&
                         (is_urgent_.load() || waited_s > kToldShare * options_.timeout_s);
  failure.kind = timed_out ? NcclFailure::Kind::kTimeout : NcclFailure::Kind::kPeer;
  fail(failure);
}

// Whoever has waited for the whole timeout asks all ranks how far they are, which their watchdogs
// answer whatever their own threads do, and then says who is behind.
void NcclWatch::look_at_time(double now_s, double waited_s) {
  if (has_failed()) return;
  if (!timed_out_) {
    if (waited_s <= options_.timeout_s) return;
    timed_out_ = sign();
    asked_s_ = now_s;
    has_given_sign_ = true;
    try {
      meeting_.give(*timed_out_);
      meeting_.ask();
    } catch (const std::exception&) {  // without the Store, nobody will answer
    }
  }
  const std::vector<RankState> ranks = rank_states();
  const bool is_complete = std::all_of(ranks.begin(), ranks.end(), [](const RankState& rank) {
    return rank.sign || rank.has_ended;
  });
  if (!is_complete && now_s - asked_s_ < 2 * idle_s() + kTick_s) return;
  fail({NcclFailure::Kind::kTimeout, explain_timeout(ranks, options_.rank, options_.timeout_s)});
}

std::vector<RankState> NcclWatch::rank_states() {
  std::vector<RankState> ranks;
  for (int r = 0; r < options_.size; ++r) {
    RankState state{meeting_.describe(r)};
    if (r == options_.rank) {
      state.sign = timed_out_;
    } else {
      state.has_ended = meeting_.has_ended(r);
      try {
        state.sign = meeting_.sign_of(r);
      } catch (const std::exception&) {  // none, then
      }
    }
    ranks.push_back(std::move(state));
  }
  return ranks;
}

Sign NcclWatch::sign() {
  Sign sign;
  NcclCalls* calls = calls_.load();
  if (calls == nullptr) return sign;
  const NcclCalls::Progress progress = calls->progress();
  const NcclCalls::Call& at = progress.oldest ? *progress.oldest : progress.last;
  sign.num_enqueued = progress.num_enqueued;
  sign.num_complete = progress.num_complete;
  sign.is_under_way = progress.oldest.has_value();
  sign.at = at.number;
  sign.for_s = at.waited_s;
  sign.text = at.text;
  return sign;
}

std::string NcclWatch::waiting_for() {
  if (is_urgent_.load()) return "the ranks to set up NCCL";
  const Sign now = sign();
  if (now.is_under_way) return concat(now.text, " (call ", now.at, ")");
  return is_captured() ? "a replayed graph, perhaps" : "nothing in particular";
}

}  // namespace pydist
