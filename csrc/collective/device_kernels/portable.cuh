// What lets one source be a kernel of the device and, with any C++ compiler, a function of the
// host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#else
#define __host__
#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#endif

namespace pydist {

constexpr int kLanes = 32;  // of a warp
// Of a block, of every kernel: two blocks fill a processor with up to 64 registers a thread.
constexpr int kKernelThreads = 512;
constexpr int kWarpsPerBlock = kKernelThreads / kLanes;

// What one lane moves with one access.
constexpr int kVectorNbytes = 16;
struct alignas(kVectorNbytes) Vector16 {
  uint32_t words[4];
};

// T is as wide as an access, and the pointer is aligned to it. On the device these are accesses of
// its memory, whatever the compiler knows of the pointer (one that was itself loaded would else
// give generic ones, and a struct four narrow ones); what is read is not expected to be read again.
template <class T>
__host__ __device__ __forceinline__ T load_aligned(const void* from) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(T) == kVectorNbytes) {
    const uint4 words = __ldcs(static_cast<const uint4*>(from));
    return {{words.x, words.y, words.z, words.w}};
  } else {
    return __ldca(static_cast<const T*>(from));
  }
#else
  T value;
  std::memcpy(&value, from, sizeof(value));
  return value;
#endif
}

template <class T>
__host__ __device__ __forceinline__ void store_aligned(void* to, T value) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(T) == kVectorNbytes) {
    const auto& words = value.words;
    __stwb(static_cast<uint4*>(to), make_uint4(words[0], words[1], words[2], words[3]));
  } else {
    __stwb(static_cast<T*>(to), value);
  }
#else
  std::memcpy(to, &value, sizeof(value));
#endif
}

__host__ __device__ __forceinline__ bool is_aligned(const void* pointer, int nbytes) {
  return (reinterpret_cast<uintptr_t>(pointer) & (nbytes - 1)) == 0;
}

__host__ __device__ __forceinline__ float float_of_bits(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
#endif
}

__host__ __device__ __forceinline__ uint32_t bits_of_float(float value) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(value);
#else
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
#endif
}

// Never contracted with an addition into one operation that rounds once.
__host__ __device__ __forceinline__ float multiplied(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

__host__ __device__ constexpr int64_t divided_up(int64_t value, int64_t by) {
  return (value + by - 1) / by;
}
__host__ __device__ constexpr int64_t rounded_up(int64_t value, int64_t to) {
  return divided_up(value, to) * to;
}

}  // namespace pydist
