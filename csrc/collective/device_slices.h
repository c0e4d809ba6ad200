// The mean by slices: every rank owns one slice of the buffer, and adds it for all.
//
//   cast      own elements to the wire's type, if that is narrower
//   exchange  slice s of every rank goes to rank s
//   add       rank s adds its slice in the order of ranks in float32 (float64 of float64), scales
//             and rounds once
//   gather    the slices go to all ranks
//   cast      back
//
// With rounding to the wire's type, of relative error u (2^-24 for float32, 2^-11 for float16, 2^-8
// for bfloat16, 2^-4 for float8), the error of an element x is at most
//
//   u * (sum of |x| over ranks + |sum of x|) / divisor      where the wire's type is narrower
//   u * |sum of x| / divisor                                where it is a half type of its own
//
// and that of the additions, (size + 1) * 2^-24 * (sum of |x|) / divisor. A float16 below 2^-14 has
// an error of up to 2^-25 a rounding instead, a float8 below 2^-6 of its block's scale of 2^-10 of
// that (which is at most 2^-17 of the block's largest magnitude).
//
// Both casts see every element, also the owner's, so that all ranks have the same bits: those of
// the CPU's transports for the same wire type.
#pragma once

#include <memory>

#include "collective/device_scratch.h"
#include "collective/wire_parts.h"

namespace pydist {

class DeviceSlices {
 public:
  DeviceSlices(std::shared_ptr<NcclCommunicator> communicator, DeviceScratch& scratch)
      : communicator_(std::move(communicator)), scratch_(scratch) {}

  void mean(const MeanTask& task);

 private:
  struct Place {
    uint8_t* data;
    size_t nbytes;
  };

  template <class Send, class Receive>
  void swap(Send&& send, Receive&& receive, const std::string& what);
  void exchange(const WireParts& slices, uint8_t* travelling, uint8_t* received,
                const std::string& what);
  void add(const MeanTask& task, const WireParts& slices, uint8_t* travelling, uint8_t* received);
  void gather(const WireParts& slices, uint8_t* travelling, const std::string& what);

  std::shared_ptr<NcclCommunicator> communicator_;
  DeviceScratch& scratch_;
};

}  // namespace pydist
