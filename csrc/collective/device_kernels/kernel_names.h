// Names of the kernels: what the descriptors and the module that launches them agree on.
#pragma once

#include "collective/device_kernels/reduce_segments.h"

namespace pydist {

constexpr const char* kCopyManyName = "copy_many";
constexpr const char* kCopyManyInspectName = "copy_many_inspect";
constexpr const char* kSumPartialsName = "sum_partials";

// By Element, from and to.
constexpr const char* kReduceSegmentsNames[kNumElements * kNumElements] = {
    "reduce_float16_to_float16",   "reduce_float16_to_bfloat16", "reduce_float16_to_float32",
    "reduce_float16_to_float64",   "reduce_float16_to_float8",   "reduce_bfloat16_to_float16",
    "reduce_bfloat16_to_bfloat16", "reduce_bfloat16_to_float32", "reduce_bfloat16_to_float64",
    "reduce_bfloat16_to_float8",   "reduce_float32_to_float16",  "reduce_float32_to_bfloat16",
    "reduce_float32_to_float32",   "reduce_float32_to_float64",  "reduce_float32_to_float8",
    "reduce_float64_to_float16",   "reduce_float64_to_bfloat16", "reduce_float64_to_float32",
    "reduce_float64_to_float64",   "reduce_float64_to_float8",   "reduce_float8_to_float16",
    "reduce_float8_to_bfloat16",   "reduce_float8_to_float32",   "reduce_float8_to_float64",
    "reduce_float8_to_float8",
};

}  // namespace pydist
