// The reduction and conversion kernels for x86-64 processors with AVX-512 (F, BW, DQ, VL); nothing
// on other architectures.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstdint>

#include "collective/convert_variants.h"
#include "collective/reduce_variants.h"

#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed between inlined functions only

// After every other header: what those define inline must stay runnable on every processor.
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")

namespace pydist {
namespace {

constexpr int kVectorNbytes = 64;
typedef uint16_t HalfWords __attribute__((vector_size(kVectorNbytes / 2)));
typedef float Floats __attribute__((vector_size(kVectorNbytes)));

constexpr __mmask16 kAllLanes =
    0xffff;  // the forms without a mask make g++ 12 warn of an uninitialised value
constexpr int kRounding = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
inline Floats widen_half(HalfWords halves) {
  return (Floats)_mm512_maskz_cvtph_ps(kAllLanes, (__m256i)halves);
}
inline HalfWords narrow_half(Floats floats) {
  return (HalfWords)_mm512_maskz_cvtps_ph(kAllLanes, (__m512)floats, kRounding);
}

}  // namespace
}  // namespace pydist

#include "collective/reduce_kernels.inl"
// After it, whose elements it uses.
#include "collective/convert_kernels.inl"

namespace pydist {

void reduce_avx512(DType dtype, ReduceOp op, const ReduceArgs& args) {
  reduce_any(dtype, op, args);
}

void convert_avx512(const ConvertArgs& args) { convert_any(args); }

}  // namespace pydist

#pragma GCC pop_options
#endif
