// Random numbers that depend on where they are drawn, not on when: the default CPU generator is
// seeded for each layer and microbatch, and gets its own state back after the stage's forward.
#pragma once

#include <ATen/core/MT19937RNGEngine.h>

#include <cstdint>
#include <mutex>
#include <optional>

namespace pydist {

// What the random numbers of one layer's forward depend on; so not on the number of ranks, the
// schedule or the order of actions.
struct SeedKey {
  uint64_t base_seed = 0;  // agreed by all ranks
  int64_t data_parallel_rank = 0;
  int64_t step = 0;
  int64_t microbatch = 0;
  int64_t layer = 0;  // its index in the unsplit model

  uint64_t mixed() const;
};

// Takes the place of manual_seed(), in a fifth of its time and with all 64 bits of the seed: that
// one fills the state by a recurrence from 32 of them.
void seed_default_generator(uint64_t seed);

// Keeps the default CPU generator's state, and gives it back when it ends. The generator is the
// process's: threads that step pipelines take turns, forward by forward. One thread may nest them.
// Waits without the GIL, which whoever has the turn may need. A forward must not wait for one of
// another thread.
class GeneratorScope {
 public:
  GeneratorScope();
  ~GeneratorScope();
  GeneratorScope(const GeneratorScope&) = delete;
  GeneratorScope& operator=(const GeneratorScope&) = delete;

 private:
  std::unique_lock<std::recursive_timed_mutex> turn_;
  at::mt19937 engine_;
  std::optional<float> next_float_;
  std::optional<double> next_double_;
};

}  // namespace pydist
