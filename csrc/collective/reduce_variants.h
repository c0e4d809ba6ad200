// One function per instruction set; reduce() chooses. A variant that this architecture lacks does
// not exist.
#pragma once

#include "collective/reduce.h"

namespace pydist {

void reduce_baseline(DType dtype, ReduceOp op, const ReduceArgs& args);
#if defined(__x86_64__)
void reduce_avx2(DType dtype, ReduceOp op, const ReduceArgs& args);
void reduce_avx512(DType dtype, ReduceOp op, const ReduceArgs& args);
#endif

}  // namespace pydist
