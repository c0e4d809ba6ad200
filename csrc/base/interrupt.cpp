#include "base/interrupt.h"

#include <atomic>

namespace pydist {

namespace {
std::atomic<void (*)()> installed_check{nullptr};
}

void set_interrupt_check(void (*check)()) { installed_check.store(check); }

void check_interrupt() {
  if (auto* check = installed_check.load()) check();
}

}  // namespace pydist
