// Random numbers that depend on where they are drawn, not on when: the default generators are
// seeded for each layer and microbatch, and get their own state back after the stage's forward. A
// device's generator counts on the host: seeding it and reading its state wait for nothing.
#pragma once

#include <ATen/core/MT19937RNGEngine.h>
#include <c10/core/Device.h>

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

// The CPU's, and that of `device` if it is another. Takes the place of manual_seed(), on the CPU in
// a fifth of its time and with all 64 bits of the seed: that one fills the state by a recurrence
// from 32 of them.
void seed_default_generators(uint64_t seed, std::optional<c10::Device> device);

// Keeps the state of the CPU's default generator and of that of `device`, and gives it back when it
// ends. Generators are the process's: threads that step pipelines take turns, forward by forward.
// One thread may nest them. Waits without the GIL, which whoever has the turn may need. A forward
// must not wait for one of another thread.
class GeneratorScope {
 public:
  explicit GeneratorScope(std::optional<c10::Device> device);
  ~GeneratorScope();
  GeneratorScope(const GeneratorScope&) = delete;
  GeneratorScope& operator=(const GeneratorScope&) = delete;

 private:
  std::unique_lock<std::recursive_timed_mutex> turn_;
  at::mt19937 engine_;
  std::optional<float> next_float_;
  std::optional<double> next_double_;
  std::optional<c10::Device> device_;
  uint64_t device_seed_ = 0;
  uint64_t device_offset_ = 0;
};

}  // namespace pydist
