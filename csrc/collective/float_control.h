// How the processor rounds while a kernel runs.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace pydist {

// Rounds to nearest and keeps subnormals while it lives, whatever the caller has set:
// torch.set_flush_denormal on one rank would otherwise change the bits of a sum depending on which
// rank computed it.
class DefaultFloatControl {
 public:
#if defined(__x86_64__)
  DefaultFloatControl() : saved_(_mm_getcsr()) { _mm_setcsr(kDefault); }
  ~DefaultFloatControl() { _mm_setcsr(saved_); }

 private:
  static constexpr unsigned kDefault = 0x1f80;  // all exceptions masked, round to nearest
  unsigned saved_;
#elif defined(__aarch64__)
  DefaultFloatControl() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" ::"r"(uint64_t{0}));
  }
  ~DefaultFloatControl() { asm volatile("msr fpcr, %0" ::"r"(saved_)); }

 private:
  uint64_t saved_;
#endif
};

}  // namespace pydist
