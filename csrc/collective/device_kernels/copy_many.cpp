// Descriptors of the kernels that copy many pieces of memory, and their bodies on the host.
#include "collective/device_kernels/copy_many.h"

#include <vector>

#include "collective/device_kernels/block_sum.cuh"
#include "collective/device_kernels/copy_many.cuh"
#include "collective/device_kernels/grid.h"
#include "collective/device_kernels/kernel_names.h"
#include "collective/float_control.h"

namespace pydist {

namespace {

template <bool kInspects>
void copy_on_host(const void* given, int num_blocks) {
  const DefaultFloatControl float_control;
  const auto& arguments = *static_cast<const CopyManyArguments*>(given);
  std::vector<float> sums(kKernelThreads);
  for (int block = 0; block < num_blocks; ++block) {
    for (int thread = 0; thread < kKernelThreads; ++thread) {
      sums[thread] = copy_tiles<kInspects>(arguments, block, num_blocks, thread).sum_of_squares;
    }
    if (kInspects && arguments.partials != nullptr) {
      store_partial(arguments, block, num_blocks, sum_of_block(sums.data()));
    }
  }
}

// The table is read: to be called when it is there, so in the order of the stream.
void visit_copies(const void* given, const VisitAccess& visit) {
  const auto& arguments = *static_cast<const CopyManyArguments*>(given);
  visit(Access::kRead, arguments.tiles, arguments.num_tiles * sizeof(CopyTile));
  for (int t = 0; t < arguments.num_tiles; ++t) {
    const CopyTile& tile = arguments.tiles[t];
    const auto count = static_cast<size_t>(tile.num_elements);
    if (tile.source != nullptr) {
      visit(Access::kRead, tile.source, count * tile_type_nbytes(tile.from));
    }
    visit(Access::kWrite, tile.target, count * tile_type_nbytes(tile.to));
  }
}

void visit_inspected_copies(const void* given, const VisitAccess& visit) {
  const auto& arguments = *static_cast<const CopyManyArguments*>(given);
  visit_copies(given, visit);
  if (arguments.found_nonfinite != nullptr) {
    visit(Access::kWrite, arguments.found_nonfinite, sizeof(float));
  }
  if (arguments.partials != nullptr) {
    visit(Access::kWrite, arguments.partials, arguments.num_partials * sizeof(float));
  }
}

void sum_on_host(const void* given, int) {
  const DefaultFloatControl float_control;
  const auto& arguments = *static_cast<const SumPartialsArguments*>(given);
  std::vector<double> sums(kKernelThreads);
  for (int thread = 0; thread < kKernelThreads; ++thread) {
    sums[thread] = sum_strided(arguments, thread);
  }
  *arguments.sum = static_cast<float>(sum_of_block(sums.data()));
}

void visit_sum(const void* given, const VisitAccess& visit) {
  const auto& arguments = *static_cast<const SumPartialsArguments*>(given);
  visit(Access::kRead, arguments.partials, arguments.num_partials * sizeof(float));
  visit(Access::kWrite, arguments.sum, sizeof(float));
}

}  // namespace

const Kernel kCopyMany = {kCopyManyName, sizeof(CopyManyArguments), kKernelThreads,
                          &copy_on_host<false>, &visit_copies};
const Kernel kCopyManyInspect = {kCopyManyInspectName, sizeof(CopyManyArguments), kKernelThreads,
                                 &copy_on_host<true>, &visit_inspected_copies};
const Kernel kSumPartials = {kSumPartialsName, sizeof(SumPartialsArguments), kKernelThreads,
                             &sum_on_host, &visit_sum};

int num_copy_partials() { return 2 * device_runtime()->num_processors(); }

int num_copy_blocks(int64_t num_tiles) {
  return num_blocks_for(num_tiles * kLanes, kKernelThreads);
}

}  // namespace pydist
