// How the engine's element types and reductions read to NCCL.
#pragma once

#include <cstdint>

#include "collective/dtype.h"
#include "collective/reduce.h"
#include "transport/nccl_api.h"

namespace pydist {

// What NCCL reduces `count` elements of a type as: complex numbers are pairs of reals.
struct NcclElements {
  nccl::DataType type;
  int64_t count;
};
NcclElements nccl_elements(DType dtype, int64_t count);

// Null where NCCL can do it, else the reason, as why_not_reducible() gives it: "sum of int16".
const char* why_not_reducible_by_nccl(DType dtype, ReduceOp op);

// For everything but kMean. Of bool, which travels as uint8, sum and max are "or".
nccl::RedOp nccl_op(DType dtype, ReduceOp op);

// 1/divisor in the type itself, as ncclRedOpCreatePreMulSum() takes it.
struct NcclScalar {
  alignas(8) unsigned char bytes[8];
};
NcclScalar nccl_reciprocal(nccl::DataType type, int divisor);

}  // namespace pydist
