#include "pipeline/seeded_generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>

#include <chrono>
#include <mutex>

#include "base/interrupt.h"

namespace pydist {

namespace {

constexpr uint64_t kGoldenGamma = 0x9e3779b97f4a7c15;

// The finaliser of SplitMix64 (Steele, Lea, Flood 2014): a bijection in which each bit of the input
// changes half of the output's.
uint64_t scramble(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

at::CPUGeneratorImpl& default_generator() {
  return *at::check_generator<at::CPUGeneratorImpl>(at::detail::getDefaultCPUGenerator());
}

at::Generator generator_of(c10::Device device) {
  return at::globalContext().defaultGenerator(device);
}

// Never destroyed: threads may outlive main().
std::recursive_timed_mutex& turns() {
  static auto* const instance = new std::recursive_timed_mutex();
  return *instance;
}

std::unique_lock<std::recursive_timed_mutex> take_turn() {
  std::unique_lock<std::recursive_timed_mutex> turn(turns(), std::defer_lock);
  while (!turn.try_lock_for(std::chrono::milliseconds(100))) check_interrupt();
  return turn;
}

}  // namespace

uint64_t SeedKey::mixed() const {
  uint64_t seed = scramble(base_seed + kGoldenGamma);
  for (const int64_t part : {data_parallel_rank, step, microbatch, layer}) {
    seed = scramble((seed ^ static_cast<uint64_t>(part)) + kGoldenGamma);
  }
  return seed;
}

void seed_default_generators(uint64_t seed, std::optional<c10::Device> device) {
  if (device) {
    at::Generator generator = generator_of(*device);
    const std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_current_seed(seed);  // and the offset is 0
  }
  at::mt19937_data_pod data;
  data.seed_ = seed;
  data.seeded_ = true;
  data.left_ = 1;  // the first draw mixes the state
  data.next_ = 0;
  uint64_t counter = seed;
  for (size_t i = 0; i < data.state_.size(); i += 2) {
    const uint64_t word = scramble(counter += kGoldenGamma);
    data.state_[i] = static_cast<uint32_t>(word);
    data.state_[i + 1] = static_cast<uint32_t>(word >> 32);
  }
  // Constructing an engine costs more than all of this.
  static thread_local at::mt19937 engine;
  engine.set_data(data);
  at::CPUGeneratorImpl& generator = default_generator();
  const std::lock_guard<std::mutex> lock(generator.mutex_);
  generator.set_engine(engine);
  generator.set_next_float_normal_sample(std::nullopt);
  generator.set_next_double_normal_sample(std::nullopt);
}

GeneratorScope::GeneratorScope(std::optional<c10::Device> device)
    : turn_(take_turn()), engine_(default_generator().engine()), device_(device) {
  if (device_) {
    at::Generator on_device = generator_of(*device_);
    const std::lock_guard<std::mutex> lock(on_device.mutex());
    device_seed_ = on_device.current_seed();
    device_offset_ = on_device.get_offset();
  }
  at::CPUGeneratorImpl& generator = default_generator();
  const std::lock_guard<std::mutex> lock(generator.mutex_);
  engine_ = generator.engine();
  next_float_ = generator.next_float_normal_sample();
  next_double_ = generator.next_double_normal_sample();
}

GeneratorScope::~GeneratorScope() {
  if (device_) {
    at::Generator on_device = generator_of(*device_);
    const std::lock_guard<std::mutex> lock(on_device.mutex());
    on_device.set_current_seed(device_seed_);
    on_device.set_offset(device_offset_);
  }
  at::CPUGeneratorImpl& generator = default_generator();
  const std::lock_guard<std::mutex> lock(generator.mutex_);
  generator.set_engine(engine_);
  generator.set_next_float_normal_sample(next_float_);
  generator.set_next_double_normal_sample(next_double_);
}

}  // namespace pydist
