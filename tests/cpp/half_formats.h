// The half types by their definition, to compare the kernels with.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

// float16 and bfloat16 by their definition, in double arithmetic: a sign, an exponent, a mantissa.
struct HalfFormat {
  int mantissa_bits;
  int bias;
  int max_exponent;  // the one of infinity and NaN
};
constexpr HalfFormat kFloat16Format = {10, 15, 31};
constexpr HalfFormat kBFloat16Format = {7, 127, 255};

inline double decode(uint16_t bits, HalfFormat format) {
  const int exponent = (bits & 0x7fff) >> format.mantissa_bits;
  const int mantissa = bits & ((1 << format.mantissa_bits) - 1);
  const double sign = bits & 0x8000 ? -1.0 : 1.0;
  if (exponent == format.max_exponent) return mantissa ? std::nan("") : sign * INFINITY;
  const int one = exponent == 0 ? 0 : 1 << format.mantissa_bits;
  const int shift = std::max(exponent, 1) - format.bias - format.mantissa_bits;
  return sign * std::ldexp(one + mantissa, shift);
}

// Rounds to the nearest, ties to even.
inline uint16_t encode(double value, HalfFormat format) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const uint16_t infinity = format.max_exponent << format.mantissa_bits;
  if (std::isnan(value)) return sign | infinity | (1 << (format.mantissa_bits - 1));
  value = std::fabs(value);
  if (std::isinf(value)) return sign | infinity;
  if (value == 0) return sign;
  const int exponent = std::max(std::ilogb(value), 1 - format.bias);
  const double units = std::nearbyint(std::ldexp(value, format.mantissa_bits - exponent));
  // A subnormal has a unit's weight of exponent 1 and no implicit one; a carry may make it, or the
  // exponent, one more.
  const double bits = std::ldexp(exponent + format.bias - 1, format.mantissa_bits) + units;
  return sign | static_cast<uint16_t>(std::min<double>(bits, infinity));
}
