// The mean of a bucket over the ranks of a device's group: which algorithm, and each of them.
//
//   nccl    NCCL's own all-reduce
//   ring    reduce-scatter and all-gather along a ring over send and receive (ring_plan.h),
//   segments
//           under way while the one before is added
//   slices  all-to-all to owners, who add in float32 in rank order, scale and round once; then
//           all-gather. The bits of the other transports, whatever the wire type.
//
// "auto" takes the fastest by a cost model that all ranks agree on, fitted at first use. float16,
// whose sum may overflow where the mean does not, always goes by slices unless one is forced.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "collective/nccl_communicator.h"

namespace pydist {

enum class WireType : uint8_t {
  kSame,
  kFloat16,
  kBFloat16,
  kFloat8
};  // kFloat8: e4m3, block scales

enum class Algorithm : uint8_t { kAuto, kNccl, kRing, kSlices };

class DeviceAllReduce {
 public:
  // Collective where `algorithm` is kAuto and no cost model has been agreed for this communicator.
  static std::unique_ptr<DeviceAllReduce> create(std::shared_ptr<NcclCommunicator> communicator,
                                                 Algorithm algorithm);
  virtual ~DeviceAllReduce() = default;

  // Leaves the mean (the sum divided by `divisor`) in `data`, which is floating, on the
  // communicator's stream. Scratch memory is made at first use of a size and kept.
  virtual void mean(void* data, int64_t count, DType dtype, WireType wire, int divisor,
                    const std::string& what) = 0;
  // What mean() would take, for reports.
  virtual Algorithm choose(int64_t count, DType dtype, WireType wire) const = 0;
};

}  // namespace pydist
