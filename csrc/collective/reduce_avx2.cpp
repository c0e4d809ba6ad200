// The reduction and conversion kernels for x86-64 processors with AVX2 and F16C; nothing on other
// architectures.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstdint>

#include "collective/convert_variants.h"
#include "collective/reduce_variants.h"

#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed between inlined functions only

// After every other header: what those define inline must stay runnable on every processor.
#pragma GCC push_options
#pragma GCC target("avx2,f16c")

namespace pydist {
namespace {

constexpr int kVectorNbytes = 32;
typedef uint16_t HalfWords __attribute__((vector_size(kVectorNbytes / 2)));
typedef float Floats __attribute__((vector_size(kVectorNbytes)));

inline Floats widen_half(HalfWords halves) { return (Floats)_mm256_cvtph_ps((__m128i)halves); }
inline HalfWords narrow_half(Floats floats) {
  return (HalfWords)_mm256_cvtps_ph((__m256)floats, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

}  // namespace
}  // namespace pydist

#include "collective/reduce_kernels.inl"
// After it, whose elements it uses.
#include "collective/convert_kernels.inl"

namespace pydist {

void reduce_avx2(DType dtype, ReduceOp op, const ReduceArgs& args) { reduce_any(dtype, op, args); }

void convert_avx2(const ConvertArgs& args) { convert_any(args); }

}  // namespace pydist

#pragma GCC pop_options
#endif
