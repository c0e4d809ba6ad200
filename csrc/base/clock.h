// Monotonic time in seconds.
#pragma once

#include <time.h>

namespace pydist {

inline double monotonic_s() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

}  // namespace pydist
