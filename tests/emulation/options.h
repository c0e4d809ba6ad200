// What a test sets: how the device behaves, and what goes wrong.
#pragma once

#include <atomic>
#include <string>

namespace pydist::emulation {

struct Options {
  std::atomic<double> max_delay_s{0.0005};     // before a piece of work, now and then
  std::atomic<double> stuck_after_s{40};       // a call waits that long before it is a fault
  std::atomic<double> in_progress_polls{0};    // of NCCL's state, before a call is through
  std::atomic<double> nccl_delay_s{0};         // before each of NCCL's operations starts
  std::atomic<double> nccl_stuck_after{-1};    // calls; those that follow never start
  std::atomic<double> async_error_after{-1};   // calls; the next one fails
  std::atomic<double> nccl_version{0};         // 0: the library's own
  std::atomic<double> init_never_finishes{0};  // 1: the ranks never find each other
  std::atomic<double> hides_completion{0};     // 1: no event is complete for the host, which must
                                               // not look again and again

  // Null where there is no such option.
  std::atomic<double>* find(const std::string& name);
  void reset();
};

Options& options();

}  // namespace pydist::emulation
