// The sum of one number of every thread of a block, in the same order on the device and the host:
// within warps by halving distances, then warp by warp.
#pragma once

#include "collective/device_kernels/portable.cuh"

namespace pydist {

#if defined(__CUDACC__)

// For thread 0; all threads call it, once in a kernel.
template <class T>
__device__ __forceinline__ T sum_of_block(T value) {
  __shared__ T of_warps[kWarpsPerBlock];
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, distance);
  }
  if (threadIdx.x % kLanes == 0) of_warps[threadIdx.x / kLanes] = value;
  __syncthreads();
  T sum = 0;
  if (threadIdx.x == 0) {
    for (int warp = 0; warp < kWarpsPerBlock; ++warp) sum += of_warps[warp];
  }
  return sum;
}

#else

// Overwrites the numbers of the kKernelThreads threads.
template <class T>
T sum_of_block(T* values) {
  T sum = 0;
  for (int warp = 0; warp < kWarpsPerBlock; ++warp) {
    T* of_lanes = values + warp * kLanes;
    for (int distance = kLanes / 2; distance > 0; distance /= 2) {
      for (int lane = 0; lane < distance; ++lane) of_lanes[lane] += of_lanes[lane + distance];
    }
    sum += of_lanes[0];
  }
  return sum;
}

#endif

}  // namespace pydist
