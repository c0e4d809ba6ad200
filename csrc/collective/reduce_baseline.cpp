// The reduction and conversion kernels for every processor of the architecture that the build was
// made for.
#include <cstdint>

#include "collective/convert_variants.h"
#include "collective/reduce_variants.h"

#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed between inlined functions only

namespace pydist {
namespace {

constexpr int kVectorNbytes = 16;
typedef uint16_t HalfWords __attribute__((vector_size(kVectorNbytes / 2)));
typedef uint32_t FloatWords __attribute__((vector_size(kVectorNbytes)));
typedef float Floats __attribute__((vector_size(kVectorNbytes)));

// float16 has 5 bits of exponent with bias 15 and 10 of mantissa, float32 has 8 with bias 127
// and 23.
inline Floats widen_half(HalfWords halves) {
  const FloatWords words = __builtin_convertvector(halves, FloatWords);
  const FloatWords magnitude = words & 0x7fffu;
  const FloatWords shifted = magnitude << 13;
  // The exponent is 112 too small. A multiplication mends that for subnormal numbers too, and is
  // exact.
  const FloatWords finite = (FloatWords)((Floats)shifted * 0x1p112f);
  const FloatWords special = shifted + (224u << 23);  // exponent 31 becomes 255: infinity and NaN
  const FloatWords bits = magnitude >= 0x7c00u ? special : finite;
  return (Floats)(bits | ((words & 0x8000u) << 16));
}

inline HalfWords narrow_half(Floats floats) {
  const FloatWords words = (FloatWords)floats;
  const FloatWords magnitude = words & 0x7fffffffu;
  // Rounds to nearest, ties to even; a carry out of the mantissa is right, it raises the exponent.
  const FloatWords normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // The last bit of 0.5f is 2^-24, that of a subnormal float16: the addition does the rounding.
  const FloatWords subnormal = (FloatWords)((Floats)magnitude + 0.5f) - 0x3f000000u;
  const FloatWords quiet_nan = ((magnitude >> 13) & 0x3ffu) | 0x7e00u;
  const FloatWords infinity = FloatWords{} + 0x7c00u;
  FloatWords half = magnitude < (113u << 23) ? subnormal : normal;
  half = magnitude >= 0x477ff000u ? infinity : half;  // 65520 and more
  half = magnitude > 0x7f800000u ? quiet_nan : half;
  return __builtin_convertvector(half | ((words >> 16) & 0x8000u), HalfWords);
}

}  // namespace
}  // namespace pydist

#include "collective/reduce_kernels.inl"
// After it, whose elements it uses.
#include "collective/convert_kernels.inl"

namespace pydist {

void reduce_baseline(DType dtype, ReduceOp op, const ReduceArgs& args) {
  reduce_any(dtype, op, args);
}

void convert_baseline(const ConvertArgs& args) { convert_any(args); }

}  // namespace pydist
