// The floating types of the kernels: how each is widened for arithmetic and rounded from it, with
// the same bits on the device and on the host. A NaN is written as the device writes it.
#pragma once

#include <tuple>
#include <type_traits>

#include "collective/device_kernels/portable.cuh"

namespace pydist {

struct Float64 {
  using Bits = uint64_t;
  using Wide = double;
  static constexpr Bits kExponent = 0x7ff0000000000000u;
  __host__ __device__ static __forceinline__ double widen(Bits bits) {
#if defined(__CUDA_ARCH__)
    return __longlong_as_double(static_cast<long long>(bits));
#else
    double value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
#endif
  }
  __host__ __device__ static __forceinline__ Bits narrow(double value) {
#if defined(__CUDA_ARCH__)
    return static_cast<Bits>(__double_as_longlong(value));
#else
    Bits bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return bits;
#endif
  }
};

struct Float32 {
  using Bits = uint32_t;
  using Wide = float;
  static constexpr Bits kExponent = 0x7f800000u;
  __host__ __device__ static __forceinline__ float widen(Bits bits) { return float_of_bits(bits); }
  __host__ __device__ static __forceinline__ Bits narrow(float value) {
    return bits_of_float(value);
  }
};

struct BFloat16 {
  using Bits = uint16_t;
  using Wide = float;
  static constexpr Bits kExponent = 0x7f80u;
  __host__ __device__ static __forceinline__ float widen(Bits bits) {
    return float_of_bits(static_cast<uint32_t>(bits) << 16);
  }
  __host__ __device__ static __forceinline__ Bits narrow(float value) {
#if defined(__CUDA_ARCH__)
    return __bfloat16_as_ushort(__float2bfloat16_rn(value));
#else
    const uint32_t bits = bits_of_float(value);
    if (value != value) return 0x7fffu;
    // To nearest, ties to even; a carry out of the mantissa is right, it reaches the exponent.
    return static_cast<Bits>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
#endif
  }
};

struct Float16 {
  using Bits = uint16_t;
  using Wide = float;
  static constexpr Bits kExponent = 0x7c00u;
  __host__ __device__ static __forceinline__ float widen(Bits bits) {
#if defined(__CUDA_ARCH__)
    return __half2float(__ushort_as_half(bits));
#else
    const uint32_t magnitude = bits & 0x7fffu;
    const uint32_t sign = (bits & 0x8000u) << 16;
    if (magnitude >= 0x7c00u) return float_of_bits(sign | ((magnitude << 13) + (224u << 23)));
    // The exponent is 112 too small; a multiplication mends that for subnormal numbers too.
    const float value = float_of_bits(magnitude << 13) * 0x1p112f;
    return float_of_bits(sign | bits_of_float(value));
#endif
  }
  __host__ __device__ static __forceinline__ Bits narrow(float value) {
#if defined(__CUDA_ARCH__)
    return __half_as_ushort(__float2half_rn(value));
#else
    const uint32_t bits = bits_of_float(value);
    const uint32_t magnitude = bits & 0x7fffffffu;
    const uint32_t sign = (bits >> 16) & 0x8000u;
    if (magnitude > 0x7f800000u) return 0x7fffu;
    if (magnitude >= 0x477ff000u) return static_cast<Bits>(sign | 0x7c00u);  // 65520 and more
    if (magnitude < (113u << 23)) {
      // The last bit of 0.5f is 2^-24, that of a subnormal float16: the addition does the rounding.
      return static_cast<Bits>(sign |
                               (bits_of_float(float_of_bits(magnitude) + 0.5f) - 0x3f000000u));
    }
    const uint32_t rounded = magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u);
    return static_cast<Bits>(sign | (rounded >> 13));
#endif
  }
};

// e4m3: no infinity, one NaN, 448 the largest; always with a scale per block (float8_wire.h).
struct Float8 {
  using Bits = uint8_t;
  using Wide = float;
  static constexpr Bits kNan = 0x7fu;
  __host__ __device__ static __forceinline__ float widen(Bits bits) {
    const uint32_t magnitude = bits & 0x7fu;
    const uint32_t sign = static_cast<uint32_t>(bits & 0x80u) << 24;
    if (magnitude == kNan) return float_of_bits(0x7fffffffu);
    // As for float16, with an exponent that is 120 too small.
    const float value = float_of_bits(magnitude << 20) * 0x1p120f;
    return float_of_bits(sign | bits_of_float(value));
  }
  // Of at most 448 in magnitude, or NaN, or infinite: which becomes NaN.
  __host__ __device__ static __forceinline__ Bits narrow(float value) {
    const uint32_t bits = bits_of_float(value);
    const uint32_t magnitude = bits & 0x7fffffffu;
    const uint32_t sign = (bits >> 24) & 0x80u;
    // Below 2^-6, subnormal: 2^14 has 2^-9 as its last bit, so that the addition does the rounding.
    const uint32_t subnormal = bits_of_float(float_of_bits(magnitude) + 0x1p14f) - 0x46800000u;
    const uint32_t normal = (magnitude - (120u << 23) + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20;
    const uint32_t finite = sign | (magnitude < (121u << 23) ? subnormal : normal);
    return static_cast<Bits>(magnitude >= Float32::kExponent ? kNan : finite);
  }
};

// In the order of the enum Element (reduce_segments.h).
template <int kElement>
using ElementAt =
    std::tuple_element_t<kElement, std::tuple<Float16, BFloat16, Float32, Float64, Float8>>;

// `kCount` elements in the registers of a lane, as they lie in memory. Kept as words: the compiler
// would else give every element a register of its own as soon as it is loaded.
template <class Element, int kCount>
struct Packed {
  using Bits = typename Element::Bits;
  static constexpr int kBits = 8 * static_cast<int>(sizeof(Bits));
  static constexpr int kVectors = kCount * kBits / (8 * kVectorNbytes);
  static_assert(kCount * kBits % (8 * kVectorNbytes) == 0, "whole accesses");

  __host__ __device__ __forceinline__ Bits get(int i) const {
    if constexpr (kBits == 64) {
      return static_cast<Bits>(word(2 * i)) | static_cast<Bits>(word(2 * i + 1)) << 32;
    } else {
      return static_cast<Bits>(word(i * kBits / 32) >> (i * kBits % 32));
    }
  }
  // Of zeros, once per element.
  __host__ __device__ __forceinline__ void set(int i, Bits bits) {
    if constexpr (kBits == 64) {
      word(2 * i) = static_cast<uint32_t>(bits);
      word(2 * i + 1) = static_cast<uint32_t>(bits >> 32);
    } else {
      word(i * kBits / 32) |= static_cast<uint32_t>(bits) << (i * kBits % 32);
    }
  }
  __host__ __device__ __forceinline__ void load(const Bits* from) {
    for (int v = 0; v < kVectors; ++v) {
      vectors[v] = load_aligned<Vector16>(reinterpret_cast<const char*>(from) + v * kVectorNbytes);
    }
  }
  __host__ __device__ __forceinline__ void store(Bits* to) const {
    for (int v = 0; v < kVectors; ++v) {
      store_aligned<Vector16>(reinterpret_cast<char*>(to) + v * kVectorNbytes, vectors[v]);
    }
  }

  Vector16 vectors[kVectors] = {};

 private:
  __host__ __device__ __forceinline__ const uint32_t& word(int w) const {
    return vectors[w / 4].words[w % 4];
  }
  __host__ __device__ __forceinline__ uint32_t& word(int w) { return vectors[w / 4].words[w % 4]; }
};

}  // namespace pydist
