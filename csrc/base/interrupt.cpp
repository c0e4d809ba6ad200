#include "base/interrupt.h"

#include <atomic>

namespace pydist {

namespace {
std::atomic<void (*)()> installed_check{nullptr};
thread_local bool checks_off = false;
}  // namespace

void set_interrupt_check(void (*check)()) { installed_check.store(check); }

void check_interrupt() {
  if (checks_off) return;
  if (auto* check = installed_check.load()) check();
}

WithoutInterrupts::WithoutInterrupts() { checks_off = true; }
WithoutInterrupts::~WithoutInterrupts() { checks_off = false; }

BlockSignals::BlockSignals() {
  sigset_t all;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &saved_);
}
BlockSignals::~BlockSignals() { ::pthread_sigmask(SIG_SETMASK, &saved_, nullptr); }

}  // namespace pydist
