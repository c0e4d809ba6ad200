#include "collective/nccl_types.h"

#include <cstring>

#include "base/check.h"
#include "base/cpu.h"
#include "collective/convert.h"

namespace pydist {

NcclElements nccl_elements(DType dtype, int64_t count) {
  switch (dtype) {
    case DType::kBool:
    case DType::kUInt8:
      return {nccl::kUint8, count};
    case DType::kInt8:
      return {nccl::kInt8, count};
    case DType::kInt32:
      return {nccl::kInt32, count};
    case DType::kInt64:
      return {nccl::kInt64, count};
    case DType::kFloat16:
      return {nccl::kFloat16, count};
    case DType::kBFloat16:
      return {nccl::kBfloat16, count};
    case DType::kFloat32:
      return {nccl::kFloat32, count};
    case DType::kFloat64:
      return {nccl::kFloat64, count};
    case DType::kComplex64:
      return {nccl::kFloat32, 2 * count};
    case DType::kComplex128:
      return {nccl::kFloat64, 2 * count};
    case DType::kInt16:
      break;
  }
  throw UsageError(concat("NCCL does not know ", dtype_name(dtype)));
}

const char* why_not_reducible_by_nccl(DType dtype, ReduceOp op) {
  if (const char* reason = why_not_reducible(dtype, op)) return reason;
  if (dtype == DType::kInt16) return "a reduction of int16 by NCCL";
  if (is_bitwise(op)) return "a bitwise operation by NCCL";
  if (is_complex(dtype) && op == ReduceOp::kProduct)
    return "the product of complex numbers by NCCL";
  return nullptr;
}

nccl::RedOp nccl_op(DType dtype, ReduceOp op) {
  const bool is_bool = dtype == DType::kBool;
  switch (op) {
    case ReduceOp::kSum:
      return is_bool ? nccl::kMax : nccl::kSum;
    case ReduceOp::kProduct:
      return is_bool ? nccl::kMin : nccl::kProd;
    case ReduceOp::kMin:
      return nccl::kMin;
    case ReduceOp::kMax:
      return nccl::kMax;
    default:
      break;
  }
  throw UsageError(concat(reduce_op_name(op), " is no plain operation of NCCL"));
}

NcclScalar nccl_reciprocal(nccl::DataType type, int divisor) {
  NcclScalar scalar{};
  const double exact = 1.0 / divisor;
  const auto single = static_cast<float>(exact);
  switch (type) {
    case nccl::kFloat64:
      std::memcpy(scalar.bytes, &exact, sizeof(exact));
      return scalar;
    case nccl::kFloat32:
      std::memcpy(scalar.bytes, &single, sizeof(single));
      return scalar;
    case nccl::kFloat16:
    case nccl::kBfloat16:
      convert(DType::kFloat32, &single, type == nccl::kFloat16 ? DType::kFloat16 : DType::kBFloat16,
              scalar.bytes, 1, Isa::kBaseline);
      return scalar;
    default:
      throw UsageError("a mean is of floating types");
  }
}

}  // namespace pydist
