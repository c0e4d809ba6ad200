// How long each algorithm takes for how many bytes, and so which is the fastest.
//
//   time = latency + nbytes / bandwidth
//
// fitted to timed calls. The number of an algorithm's steps is in its latency, and how often it
// sends a byte in its bandwidth: both are the same for all calls of a group.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "collective/device_all_reduce.h"

namespace pydist {

struct Timing {
  int64_t nbytes;
  double time_s;
};

struct CostLine {
  double latency_s = 0;
  double s_per_byte = 0;

  double time_s(int64_t nbytes) const {
    return latency_s + s_per_byte * static_cast<double>(nbytes);
  }
};

// The line of least relative errors, neither number below 0. One timing, or several of one size,
// give a constant.
CostLine fit_line(const std::vector<Timing>& timings);

class CostModel {
 public:
  static constexpr std::array<Algorithm, 3> kAlgorithms = {Algorithm::kNccl, Algorithm::kRing,
                                                           Algorithm::kSlices};

  // Of kAlgorithms, in that order.
  explicit CostModel(const std::array<std::vector<Timing>, 3>& timings);

  const CostLine& line(int index) const { return lines_[index]; }
  // The first of equals. The same for the same timings, on every machine of an architecture.
  Algorithm fastest(int64_t nbytes) const;

 private:
  std::array<CostLine, 3> lines_;
};

}  // namespace pydist
