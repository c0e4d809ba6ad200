// How many blocks a kernel is launched with.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/device_runtime.h"

namespace pydist {

// Enough for the work, but not more than fill the current device: its blocks go on with further
// work in strides of the grid.
inline int num_blocks_for(int64_t num_threads, int threads_per_block) {
  const int64_t needed = (num_threads + threads_per_block - 1) / threads_per_block;
  const int64_t full = 2 * device_runtime()->num_processors();
  return static_cast<int>(std::max<int64_t>(std::min(needed, full), 1));
}

}  // namespace pydist
