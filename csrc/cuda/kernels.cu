// The kernels as the device runs them: thin functions around the bodies in
// collective/device_kernels, found by name.
#include <utility>

#include "collective/device_kernels/block_sum.cuh"
#include "collective/device_kernels/copy_many.cuh"
#include "collective/device_kernels/kernel_names.h"
#include "collective/device_kernels/reduce_segments.cuh"
#include "cuda/kernels.h"

namespace pydist {

namespace device {

constexpr int kBlocksPerProcessor = 2;

template <bool kInspects>
__global__ __launch_bounds__(kKernelThreads, kBlocksPerProcessor) void copy_many(
    const __grid_constant__ CopyManyArguments arguments) {
  const int block = static_cast<int>(blockIdx.x);
  const int num_blocks = static_cast<int>(gridDim.x);
  const Inspection inspection =
      copy_tiles<kInspects>(arguments, block, num_blocks, static_cast<int>(threadIdx.x));
  if constexpr (kInspects) {
    if (arguments.partials == nullptr) return;
    const float sum = sum_of_block(inspection.sum_of_squares);
    if (threadIdx.x == 0) store_partial(arguments, block, num_blocks, sum);
  }
}

__global__ __launch_bounds__(kKernelThreads, kBlocksPerProcessor) void sum_partials(
    const __grid_constant__ SumPartialsArguments arguments) {
  const double sum = sum_of_block(sum_strided(arguments, static_cast<int>(threadIdx.x)));
  if (threadIdx.x == 0) *arguments.sum = static_cast<float>(sum);
}

template <class From, class To>
__global__ __launch_bounds__(kKernelThreads, kBlocksPerProcessor) void reduce(
    const __grid_constant__ ReduceSegmentsArguments arguments) {
  reduce_on_device<From, To>(arguments);
}

}  // namespace device

namespace {

template <int... kPair>
const void* find_reduce(const std::string& name, std::integer_sequence<int, kPair...>) {
  const void* found = nullptr;
  const auto look = [&](const char* known, const void* function) {
    if (name == known) found = function;
  };
  (look(kReduceSegmentsNames[kPair],
        reinterpret_cast<const void*>(
            &device::reduce<ElementAt<kPair / kNumElements>, ElementAt<kPair % kNumElements>>)),
   ...);
  return found;
}

}  // namespace

const void* find_device_function(const std::string& name) {
  if (name == kCopyManyName) return reinterpret_cast<const void*>(&device::copy_many<false>);
  if (name == kCopyManyInspectName) return reinterpret_cast<const void*>(&device::copy_many<true>);
  if (name == kSumPartialsName) return reinterpret_cast<const void*>(&device::sum_partials);
  return find_reduce(name, std::make_integer_sequence<int, kNumElements * kNumElements>());
}

}  // namespace pydist
