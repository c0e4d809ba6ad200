// The element-wise reduction of several buffers: the arithmetic of all collectives.
#pragma once

#include <cstdint>

#include "base/cpu.h"
#include "collective/dtype.h"

namespace pydist {

// The last three work on the bits of integers and bool.
enum class ReduceOp : uint8_t { kSum, kMean, kMin, kMax, kProduct, kBitAnd, kBitOr, kBitXor };
constexpr int kNumReduceOps = 8;

constexpr bool is_bitwise(ReduceOp op) { return op >= ReduceOp::kBitAnd; }

// "sum", "mean", ..., "bitwise and"
const char* reduce_op_name(ReduceOp op);

// An output may be one of the inputs, at the same address; any other overlap is forbidden.
struct ReduceArgs {
  const void* const* inputs;
  int num_inputs;
  void* const* outputs;
  int num_outputs;
  int64_t num_elements;
  int divisor = 0;  // of kMean; 0: num_inputs
};

// Null where the kernels can do it, else the reason: "mean of int64".
const char* why_not_reducible(DType dtype, ReduceOp op);

// outputs[k][i] = inputs[0][i] op inputs[1][i] op ..., in this order, for every k. An element's
// bits depend on its inputs alone: not on how the tensor is cut, on `isa`, on the caller's rounding
// mode or on whether it flushes subnormals.
//
// float16 and bfloat16 are accumulated in float32 and rounded once; everything else in its own
// type. kMean multiplies the sum by 1/divisor before it is rounded. kMin and kMax propagate NaN.
// Of bool, sum, max and bitwise or are "or", product, min and bitwise and are "and", bitwise xor is
// "differ in an odd number of". Integers wrap. Raises UsageError where
// why_not_reducible() gives a reason.
void reduce(DType dtype, ReduceOp op, const ReduceArgs& args, Isa isa);

}  // namespace pydist
