// The fit of the cost model.
#include "collective/cost_model.h"

#include <algorithm>

namespace pydist {

namespace {

constexpr double kShortest_s = 1e-9;  // a clock may stand still

// Sums over timings with weight 1 / time^2, so that small sizes count as much as large ones.
struct WeightedSums {
  double one = 0;
  double x = 0;
  double xx = 0;
  double y = 0;
  double xy = 0;

  explicit WeightedSums(const std::vector<Timing>& timings) {
    for (const Timing& timing : timings) {
      const auto nbytes = static_cast<double>(timing.nbytes);
      const double time_s = std::max(timing.time_s, kShortest_s);
      const double weight = 1 / (time_s * time_s);
      one += weight;
      x += weight * nbytes;
      xx += weight * nbytes * nbytes;
      y += weight * time_s;
      xy += weight * nbytes * time_s;
    }
  }
};

}  // namespace

CostLine fit_line(const std::vector<Timing>& timings) {
  if (timings.empty()) return {};
  const WeightedSums sums(timings);
  const double spread = sums.one * sums.xx - sums.x * sums.x;
  // Sizes are equal, but for rounding.
  if (spread <= 1e-9 * sums.one * sums.xx) return {sums.y / sums.one, 0};
  CostLine line;
  line.s_per_byte = (sums.one * sums.xy - sums.x * sums.y) / spread;
  line.latency_s = (sums.y - line.s_per_byte * sums.x) / sums.one;
  if (line.s_per_byte < 0) return {sums.y / sums.one, 0};
  if (line.latency_s < 0) return {0, sums.xy / sums.xx};
  return line;
}

CostModel::CostModel(const std::array<std::vector<Timing>, 3>& timings) {
  for (size_t i = 0; i < timings.size(); ++i) lines_[i] = fit_line(timings[i]);
}

Algorithm CostModel::fastest(int64_t nbytes) const {
  size_t best = 0;
  for (size_t i = 1; i < lines_.size(); ++i) {
    if (lines_[i].time_s(nbytes) < lines_[best].time_s(nbytes)) best = i;
  }
  return kAlgorithms[best];
}

}  // namespace pydist
