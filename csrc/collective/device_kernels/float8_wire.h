// How float8 e4m3 travels: one byte an element, and one byte of scale for each block of 128.
//
//   | codes, padded to a multiple of 128 | scales, padded to a multiple of 16 |
//
// A scale byte b is the power of two 2^(b - 127) (torch's float8_e8m0fnu); an element is its code
// (float8_e4m3fn) times the scale of its block. The scale is the smallest with which the largest
// finite magnitude of the block is at most 448, so that finite values are exact or rounded once,
// and at least 2^-126: values below 2^-136 become zero, those that round to 2^128 infinite.
// Infinity and NaN arrive as NaN, wherever they stand, and leave the rest of their block alone.
#pragma once

#include <cstdint>

namespace pydist {

constexpr int kFloat8Block = 128;

// Where the scales are, from the codes' begin.
constexpr int64_t float8_scales_offset(int64_t num_elements) {
  return (num_elements + kFloat8Block - 1) / kFloat8Block * kFloat8Block;
}

// Of one buffer; codes begin at a multiple of 16.
constexpr int64_t float8_nbytes(int64_t num_elements) {
  const int64_t num_blocks = (num_elements + kFloat8Block - 1) / kFloat8Block;
  return float8_scales_offset(num_elements) + (num_blocks + 15) / 16 * 16;
}

}  // namespace pydist
