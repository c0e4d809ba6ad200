// The kernels that add segments of memory and round once, on a device: what slices and rings do
// with what has arrived, and, with one segment, every cast to and from the type of the wire.
#pragma once

#include <cstdint>

#include "base/device_runtime.h"
#include "collective/device_kernels/float8_wire.h"
#include "collective/dtype.h"

namespace pydist {

enum class Element : uint8_t { kFloat16, kBFloat16, kFloat32, kFloat64, kFloat8 };
constexpr int kNumElements = 5;

const char* element_name(Element element);  // torch's, but for "float8"
// Of a real floating type.
Element element_of(DType dtype);
// Of a buffer of this many; of float8 with its scales (float8_wire.h).
int64_t element_nbytes(Element element, int64_t num_elements);

// output[i] = round(scale * (input 0 [i] + input 1 [i] + ...)), added in this order in float32, in
// float64 where the inputs are. The bits of reduce() (collective/reduce.h), with scale = 1 /
// divisor of kMean, where types are equal; a value too large for float16 becomes infinity.
//
// Input k lies at `inputs` + k * `stride_nbytes`, but for the one of index `own`, if that is one,
// which lies at `own_input`. The output may be one of the inputs, if its type is as wide; any other
// overlap is forbidden. Buffers of float8 begin at a multiple of 16 bytes, others at a multiple of
// their element's size: all at multiples of 16 is much faster.
struct ReduceSegmentsArguments {
  const void* inputs = nullptr;
  int64_t stride_nbytes = 0;
  const void* own_input = nullptr;
  void* output = nullptr;
  int64_t num_elements = 0;
  double scale = 1;
  int32_t num_inputs = 1;
  int32_t own = -1;
};

const Kernel& reduce_segments_kernel(Element from, Element to);

// On the registered device. Raises UsageError where the arguments break the rules above.
void reduce_segments(Element from, Element to, const ReduceSegmentsArguments& arguments,
                     Stream stream);

}  // namespace pydist
