// The thread that looks at all NCCL communicators of the process: once a second, ten times where a
// call takes longer than that.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "collective/nccl_watch.h"

namespace pydist {

class NcclWatchdog {
 public:
  // Never destroyed, as communicators may outlive static objects. Not in a forked child.
  static NcclWatchdog& instance();

  // Starts the thread with the first.
  void add(std::shared_ptr<NcclWatch> watch);
  void remove(const NcclWatch* watch) noexcept;
  // Ends the thread for good: what follows is the end of the process. Returns after `timeout_s` in
  // any case.
  void stop(double timeout_s) noexcept;
  bool has_stopped() const;

 private:
  NcclWatchdog() = default;
  void run();

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::shared_ptr<NcclWatch>> watches_;
  bool is_running_ = false;
  bool is_stopping_ = false;
};

}  // namespace pydist
