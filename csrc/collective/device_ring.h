// The mean by a ring (ring.h) over NCCL's send and receive.
//
// Segments move in the communicator's stream and are added in another of this class. Elements are
// rounded to the wire's type before they are added, and every sum when it is sent on: with rounding
// of relative error u (2^-24 for float32, 2^-53 for float64, 2^-11 for float16, 2^-8 for bfloat16,
// 2^-4 for float8), the error of an element x is at most
//
//   (size + 1) * u * (sum of |x| over ranks) / divisor
//
// where size * u is small. A float16 below 2^-14, a float8 far below the largest of its block: as
// by slices (device_slices.h), for each of the 2 * size - 1 roundings. Sums in float16 overflow
// beyond 65504, though the mean may not. All ranks have the same bits.
#pragma once

#include <memory>
#include <vector>

#include "base/device_handles.h"
#include "collective/device_scratch.h"
#include "collective/wire_parts.h"

namespace pydist {

class DeviceRing {
 public:
  DeviceRing(std::shared_ptr<NcclCommunicator> communicator, DeviceScratch& scratch);

  // For two ranks or more.
  void mean(const MeanTask& task);

 private:
  class Transport;

  // More segments move and add at once, but each is a launch: none is shorter than this.
  static constexpr int64_t kSegmentNbytes = 512 * 1024;
  static constexpr int kMaxInFlight = 4;

  std::shared_ptr<NcclCommunicator> communicator_;
  DeviceScratch& scratch_;
  OwnedStream adder_;
  std::vector<OwnedEvent> moved_;  // by segment in flight
  std::vector<OwnedEvent> added_;
};

}  // namespace pydist
