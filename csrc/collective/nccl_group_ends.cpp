// How a communicator begins and ends.
#include <atomic>
#include <csignal>
#include <functional>
#include <optional>

#include "base/check.h"
#include "base/fork.h"
#include "base/polling.h"
#include "collective/nccl_group.h"
#include "collective/nccl_watchdog.h"

namespace pydist {

namespace {

constexpr useconds_t kMeet_us = 20'000;  // between requests to the Store while ranks are coming
constexpr useconds_t kConnect_us = 20;
constexpr useconds_t kDrain_us = 50;
constexpr double kAborted_s = 30;  // for the device to come to its end after an abort

using AroundEnd = void (*)(const std::function<void()>& end);
std::atomic<AroundEnd> around_end{[](const std::function<void()>& end) { end(); }};

}  // namespace

void NcclGroup::set_up() {
  const DeviceGuard guard(options_.device);
  on_device_ = std::make_unique<OnDevice>(*watch_);
  watch_->open(&on_device_->calls);
  watch_->set_urgent(true);
  NcclWatchdog::instance().add(watch_);
  try {
    meet();
    connect();
    on_device_->memory.agree();
  } catch (const std::exception& error) {
    fail(concat(watch_->me(), " failed to set up NCCL: ", error.what()));
    throw;
  } catch (...) {  // a signal's handler raised
    fail(watch_->me() + " failed to set up NCCL");
    throw;
  }
  watch_->set_urgent(false);
}

// All ranks have come before any of them enters NCCL, whose own messages name nobody.
void NcclGroup::meet() {
  NcclMeeting& meeting = watch_->meeting();
  if (rank() == 0) {
    nccl::UniqueId id{};
    const nccl::Result result = api().get_unique_id(&id);
    if (result != nccl::kSuccess) watch_->raise(result, "making the group's unique id");
    meeting.publish_id(id);
  }
  meeting.arrive();
  watch_->await([&] { return meeting.all_arrived(); }, kMeet_us, options_.timeout_s,
                [&] {
                  return concat(watch_->me(), " waited ", options_.timeout_s, " s for ",
                                meeting.missing(), " to set up NCCL");
                });
}

void NcclGroup::connect() {
  NcclHandle& handle = watch_->handle();
  const std::optional<nccl::UniqueId> id = watch_->meeting().find_id();
  PYDIST_CHECK(id, Error, "the group's unique id is missing in the Store");
  nccl::Result result = handle.begin(*id, options_);
  watch_->await(
      [&] {
        if (result == nccl::kInProgress) result = handle.state();
        return result != nccl::kInProgress;
      },
      kConnect_us, options_.timeout_s,
      [&] {
        return concat(watch_->me(), " waited ", options_.timeout_s,
                      " s for NCCL to connect the ranks, which all have come (NCCL_DEBUG=INFO "
                      "says more)");
      });
  if (result != nccl::kSuccess) watch_->raise(result, "setting up NCCL");
}

bool NcclGroup::nothing_left() {
  NcclCalls& calls = on_device_->calls;
  return calls.is_done(calls.last_mark()) && on_device_->memory.sweep();
}

// Waits for the device. False where a signal has ended that.
bool NcclGroup::drain() {
  if (watch_->has_failed()) return true;
  on_device_->calls.mark();
  try {
    watch_->await([&] { return nothing_left(); }, kDrain_us, watch_->last_resort_s(),
                  [&] {
                    return concat(watch_->me(), " waited ", watch_->last_resort_s(),
                                  " s for its device");
                  });
  } catch (const Error&) {  // somebody has failed, and the device's work is aborted
  } catch (...) {
    return false;
  }
  return true;
}

// True once the device is through with everything.
bool NcclGroup::await_abort() noexcept {
  try {
    Polling polling(kDrain_us);
    while (!nothing_left()) {
      if (polling.waited_s() > kAborted_s) return false;
      polling.pause();
    }
    return true;
  } catch (...) {  // the device has failed
    return false;
  }
}

void NcclGroup::tear_down() {
  NcclHandle& handle = watch_->handle();
  for (const Divisor& made : divisors_) {
    handle.run([&](nccl::Comm comm) { return api().red_op_destroy(made.op, comm); });
  }
  handle.finish();
}

// What a device still works on is left alone, whatever that costs.
NcclGroup::~NcclGroup() {
  if (on_device_ == nullptr) return;
  if (in_forked_child() || NcclWatchdog::instance().has_stopped()) {
    (void)on_device_.release();  // not this process's, or the process is about to end
    return;
  }
  bool is_interrupted = false;
  bool is_free = false;
  try {
    const DeviceGuard guard(options_.device);
    if (!device_runtime()->is_capturing(stream())) {
      is_interrupted = !drain();
      is_free = await_abort();
    }
    if (is_free && !watch_->has_failed()) tear_down();
    watch_->close();
    if (is_free) on_device_.reset();
  } catch (...) {  // the device has failed
    watch_->close();
  }
  (void)on_device_.release();
  NcclWatchdog::instance().remove(watch_.get());
  // A destructor cannot raise what the signal's handler did: the signal comes again.
  if (is_interrupted) std::raise(SIGINT);
}

void NcclCommunicator::set_around_end(AroundEnd around) { around_end.store(around); }

std::shared_ptr<NcclCommunicator> NcclCommunicator::create(std::unique_ptr<Store> store,
                                                           const NcclOptions& options) {
  watch_forks();
  PYDIST_CHECK(!in_forked_child(), UsageError,
               "NCCL cannot be used in a forked child: start the process with the spawn method");
  PYDIST_CHECK(device_runtime() != nullptr, UsageError,
               "no device can be used: this build of pydist has no CUDA, or no driver was found");
  const std::shared_ptr<NcclGroup> group(
      new NcclGroup(nccl::api(), std::move(store), options),
      [](NcclGroup* ended) { around_end.load()([ended] { delete ended; }); });
  group->set_up();
  return group;
}

}  // namespace pydist
