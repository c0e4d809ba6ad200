#include "base/fork.h"

#include <pthread.h>

#include <atomic>

namespace pydist {

namespace {
std::atomic<bool> is_child{false};
}

void watch_forks() {
  static const int registered =
      ::pthread_atfork(nullptr, nullptr, [] { is_child.store(true, std::memory_order_relaxed); });
  (void)registered;
}

bool in_forked_child() { return is_child.load(std::memory_order_relaxed); }

}  // namespace pydist
