// The cost model's fit and choice.
#include "collective/cost_model.h"

#include <cmath>
#include <random>

#include "check.h"

using namespace pydist;

namespace {

constexpr int64_t kSizes[] = {16 << 10, 256 << 10, 4 << 20, 32 << 20};

std::vector<Timing> timings_of(CostLine line, double noise = 0, unsigned seed = 0) {
  std::mt19937 generator(seed);
  std::uniform_real_distribution<double> factor(1 - noise, 1 + noise);
  std::vector<Timing> timings;
  for (const int64_t nbytes : kSizes) {
    timings.push_back({nbytes, line.time_s(nbytes) * factor(generator)});
  }
  return timings;
}

bool is_near(double found, double expected, double relative) {
  return std::fabs(found - expected) <= relative * expected;
}

void test_a_line_is_found_again() {
  for (const double latency_s : {1e-6, 20e-6, 1e-3}) {
    for (const double s_per_byte : {1e-12, 1e-10, 1e-8}) {
      const CostLine line = fit_line(timings_of({latency_s, s_per_byte}));
      CHECK(is_near(line.latency_s, latency_s, 1e-6));
      CHECK(is_near(line.s_per_byte, s_per_byte, 1e-6));
    }
  }
}

// Each size is off by up to a fifth, and so is the line, at small sizes as at large ones.
void test_noise_is_not_amplified() {
  for (unsigned seed = 0; seed < 200; ++seed) {
    const CostLine line = fit_line(timings_of({20e-6, 1e-11}, 0.2, seed));
    for (const int64_t nbytes : kSizes) {
      CHECK(is_near(line.time_s(nbytes), 20e-6 + 1e-11 * double(nbytes), 0.35));
    }
  }
}

void test_nothing_is_negative() {
  const CostLine falling = fit_line({{1000, 2e-3}, {1000000, 1e-3}});
  CHECK(falling.s_per_byte == 0 && falling.latency_s >= 1e-3 && falling.latency_s <= 2e-3);
  const CostLine steep = fit_line({{1000, 1e-6}, {1000000, 2e-3}});
  CHECK(steep.latency_s == 0 && steep.s_per_byte > 0);
  const CostLine none = fit_line({});
  CHECK(none.latency_s == 0 && none.s_per_byte == 0);
  const CostLine one = fit_line({{1000, 3e-6}});
  CHECK(is_near(one.latency_s, 3e-6, 1e-12) && one.s_per_byte == 0);
  const CostLine same_size = fit_line({{1000, 3e-6}, {1000, 3e-6}});
  CHECK(is_near(same_size.latency_s, 3e-6, 1e-6) && same_size.s_per_byte == 0);
  const CostLine stopped_clock = fit_line({{1000, 0}, {1000000, 0}});
  CHECK(std::isfinite(stopped_clock.latency_s) && stopped_clock.s_per_byte >= 0);
}

void test_the_fastest_is_taken() {
  // NCCL has the lowest latency, slices the highest bandwidth: they meet at 10 us / 2 ps a byte.
  const CostModel model(
      {timings_of({10e-6, 6e-12}), timings_of({90e-6, 5e-12}), timings_of({20e-6, 4e-12})});
  CHECK(model.fastest(0) == Algorithm::kNccl);
  CHECK(model.fastest(4'900'000) == Algorithm::kNccl);
  CHECK(model.fastest(5'100'000) == Algorithm::kSlices);
  CHECK(model.fastest(int64_t{1} << 40) == Algorithm::kSlices);
  const CostModel ring_wins(
      {timings_of({10e-6, 6e-12}), timings_of({20e-6, 3e-12}), timings_of({20e-6, 4e-12})});
  CHECK(ring_wins.fastest(1 << 30) == Algorithm::kRing);
}

void test_equals_go_to_nccl() {
  const std::vector<Timing> same = timings_of({10e-6, 5e-12});
  const CostModel model({same, same, same});
  for (const int64_t nbytes : kSizes) CHECK(model.fastest(nbytes) == Algorithm::kNccl);
}

}  // namespace

int main() {
  test_a_line_is_found_again();
  test_noise_is_not_amplified();
  test_nothing_is_negative();
  test_the_fastest_is_taken();
  test_equals_go_to_nccl();
  return 0;
}
