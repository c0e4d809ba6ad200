// Conversion of buffers between floating types: gradients to and from the type they travel in.
#pragma once

#include <cstdint>

#include "base/cpu.h"
#include "collective/dtype.h"

namespace pydist {

// Real floating types: what convert() takes.
constexpr bool is_convertible(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBFloat16 || dtype == DType::kFloat32 ||
         dtype == DType::kFloat64;
}

// target[i] = source[i], rounded to nearest, ties to even; what is too large becomes infinity, and
// a NaN stays one, quiet. As torch's Tensor.to(), float64 and a half type are converted by way of
// float32. Buffers must not overlap. An element's bits depend neither on `isa` nor on the caller's
// rounding mode. Raises UsageError for other types.
void convert(DType from, const void* source, DType to, void* target, int64_t num_elements, Isa isa);

}  // namespace pydist
