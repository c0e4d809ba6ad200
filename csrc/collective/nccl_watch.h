// What goes wrong with one communicator: noticed, told to the peers, remembered.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "collective/nccl_calls.h"
#include "collective/nccl_communicator.h"
#include "collective/nccl_handle.h"
#include "collective/nccl_meeting.h"

namespace pydist {

class NcclWatch {
 public:
  NcclWatch(const nccl::Api& api, std::unique_ptr<Store> store, const NcclOptions& options);

  NcclHandle& handle() { return handle_; }
  NcclMeeting& meeting() { return meeting_; }
  const NcclOptions& options() const { return options_; }
  std::string me() { return meeting_.describe(options_.rank); }

  bool has_failed() const { return failed_.load(std::memory_order_acquire); }
  // Raises what has failed, and UsageError in a forked child.
  void check();
  // The first failure counts: it is told to the peers, and the device's work aborted.
  void fail(const NcclFailure& failure) noexcept;
  // What NCCL says of the call that gave `result`: fails with it. Raises.
  [[noreturn]] void raise(nccl::Result result, const std::string& operation);

  // Waits until is_done(), looking at signals and failures; `sleep_us` between looks. The watchdog
  // ends the wait where a call on the device takes too long; in any case it ends after `limit_s`,
  // with a TimeoutError of why_not().
  void await(const std::function<bool()>& is_done, useconds_t sleep_us, double limit_s,
             const std::function<std::string()>& why_not);
  // Of waits for the device, whose time the watchdog looks at first.
  double last_resort_s() const;

  // Until close(), the watchdog looks at `calls` too.
  void open(NcclCalls* calls) { calls_.store(calls); }
  // Ranks are being set up: look often.
  void set_urgent(bool urgent) { is_urgent_.store(urgent); }
  // Graphs with calls that nobody sees may be under way at any time.
  void set_captured() { is_captured_.store(true, std::memory_order_relaxed); }
  bool is_captured() const { return is_captured_.load(std::memory_order_relaxed); }
  // Nothing is looked at from now on.
  void close() noexcept;

  // The watchdog's look; returns the seconds until the next.
  double look() noexcept;

 private:
  double idle_s() const;
  double slow_s() const;
  double look_at_all();
  void hear_peers();
  void look_at_news(double waited_s);
  void look_for_ended(bool may_leave);
  bool has_left(int rank);
  void look_at_state();
  void heed(const NcclMeeting::News& news, double waited_s);
  void look_at_time(double now_s, double waited_s);
  std::vector<RankState> rank_states();
  Sign sign();
  std::string waiting_for();

  const NcclOptions options_;
  NcclHandle handle_;
  NcclMeeting meeting_;

  std::atomic<bool> failed_{false};
  std::mutex failure_mutex_;
  NcclFailure failure_;  // constant once failed_

  std::atomic<bool> is_urgent_{false};
  std::atomic<bool> is_captured_{false};
  std::atomic<NcclCalls*> calls_{nullptr};
  std::mutex look_mutex_;  // guards what follows
  bool is_closed_ = false;
  double next_news_s_ = 0;
  int num_store_errors_ = 0;  // in a row
  bool has_given_sign_ = false;
  std::optional<Sign> timed_out_ = {};  // this rank's sign at its timeout
  double asked_s_ = 0;                  // when the others were asked for theirs
};

}  // namespace pydist
