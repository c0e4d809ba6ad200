#include "collective/reduce.h"

#include "base/check.h"
#include "collective/float_control.h"
#include "collective/reduce_variants.h"

namespace pydist {

const char* reduce_op_name(ReduceOp op) {
  constexpr const char* kNames[kNumReduceOps] = {
      "sum", "mean", "min", "max", "product", "bitwise and", "bitwise or", "bitwise xor"};
  return kNames[static_cast<int>(op)];
}

const char* why_not_reducible(DType dtype, ReduceOp op) {
  if (op == ReduceOp::kMean && is_integral(dtype)) return "the mean of integers or bool";
  if ((op == ReduceOp::kMin || op == ReduceOp::kMax) && is_complex(dtype)) {
    return "min or max of complex numbers";
  }
  if (is_bitwise(op) && !is_integral(dtype)) return "a bitwise operation on numbers with fractions";
  return nullptr;
}

void reduce(DType dtype, ReduceOp op, const ReduceArgs& args, Isa isa) {
  const char* reason = why_not_reducible(dtype, op);
  PYDIST_CHECK(reason == nullptr, UsageError, reason, " is not defined (", reduce_op_name(op),
               " of ", dtype_name(dtype), ")");
  if (args.num_elements == 0 || args.num_outputs == 0) return;
  const DefaultFloatControl float_control;
#if defined(__x86_64__)
  if (isa == Isa::kAvx512) return reduce_avx512(dtype, op, args);
  if (isa == Isa::kAvx2) return reduce_avx2(dtype, op, args);
#endif
  (void)isa;
  reduce_baseline(dtype, op, args);
}

}  // namespace pydist
