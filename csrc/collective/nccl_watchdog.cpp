#include "collective/nccl_watchdog.h"

#include <algorithm>
#include <chrono>

#include "base/fork.h"
#include "base/interrupt.h"

namespace pydist {

namespace {

constexpr double kLongest_s = 60;

}  // namespace

NcclWatchdog& NcclWatchdog::instance() {
  static NcclWatchdog& instance = *new NcclWatchdog;
  return instance;
}

void NcclWatchdog::add(std::shared_ptr<NcclWatch> watch) {
  const std::lock_guard<std::mutex> lock(mutex_);
  watches_.push_back(std::move(watch));
  changed_.notify_all();
  if (is_running_ || is_stopping_) return;
  std::thread([this] { run(); }).detach();
  is_running_ = true;
}

void NcclWatchdog::remove(const NcclWatch* watch) noexcept {
  if (in_forked_child()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto is_it = [watch](const auto& other) { return other.get() == watch; };
  watches_.erase(std::remove_if(watches_.begin(), watches_.end(), is_it), watches_.end());
}

void NcclWatchdog::stop(double timeout_s) noexcept {
  if (in_forked_child()) return;
  std::unique_lock<std::mutex> lock(mutex_);
  is_stopping_ = true;
  changed_.notify_all();
  changed_.wait_for(lock, std::chrono::duration<double>(timeout_s),
                    [this] { return !is_running_; });
}

bool NcclWatchdog::has_stopped() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return is_stopping_;
}

void NcclWatchdog::run() {
  const WithoutInterrupts without_interrupts;
  try {
    device_runtime()->relax_capture_checks();
  } catch (const std::exception&) {  // the device has failed: looks will find that
  }
  std::unique_lock<std::mutex> lock(mutex_);
  while (!is_stopping_) {
    const std::vector<std::shared_ptr<NcclWatch>> watches = watches_;
    lock.unlock();
    double pause_s = kLongest_s;
    for (const auto& watch : watches) pause_s = std::min(pause_s, watch->look());
    lock.lock();
    if (is_stopping_) break;
    changed_.wait_for(lock, std::chrono::duration<double>(pause_s));
  }
  is_running_ = false;
  changed_.notify_all();
}

}  // namespace pydist
