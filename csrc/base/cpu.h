// What the processor offers: usable cores, instruction sets, the pause hint.
#pragma once

#include <cstdint>

namespace pydist {

// Instruction sets that hot loops are compiled for, in ascending order of capability.
enum class Isa : uint8_t { kBaseline = 0, kAvx2 = 1, kAvx512 = 2 };

// The best variant that this processor and operating system can run.
Isa detect_isa();

// Cores this process may use, by affinity mask and cgroup quota; at least 1.
int usable_cpus();

// Tells the core that this is a spin loop.
inline void cpu_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace pydist
