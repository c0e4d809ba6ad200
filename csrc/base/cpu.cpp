#include "base/cpu.h"

#include <sched.h>

#include <algorithm>
#include <cmath>

#include "base/limits.h"

namespace pydist {

Isa detect_isa() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return Isa::kAvx512;
  }
  if (avx2) return Isa::kAvx2;
#endif
  return Isa::kBaseline;
}

int usable_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  int count = 1;
  if (::sched_getaffinity(0, sizeof(set), &set) == 0) count = CPU_COUNT(&set);
  return std::max(1, std::min(count, static_cast<int>(std::ceil(cgroup_cpus()))));
}

}  // namespace pydist
