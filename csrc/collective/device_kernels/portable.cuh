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

// Tells the compiler that a pointer that was itself loaded from memory is of the device's memory:
// it would generate slower, generic accesses else.
__host__ __device__ __forceinline__ void assume_global(const void* pointer) {
#if defined(__CUDA_ARCH__)
  __builtin_assume(__isGlobal(pointer));
#else
  (void)pointer;
#endif
}

// T is as wide as an access, and the pointer is aligned to it.
template <class T>
__host__ __device__ __forceinline__ T load_aligned(const void* from) {
#if defined(__CUDA_ARCH__)
  return *static_cast<const T*>(from);
#else
  T value;
  std::memcpy(&value, from, sizeof(value));
  return value;
#endif
}

template <class T>
__host__ __device__ __forceinline__ void store_aligned(void* to, T value) {
#if defined(__CUDA_ARCH__)
  *static_cast<T*>(to) = value;
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
