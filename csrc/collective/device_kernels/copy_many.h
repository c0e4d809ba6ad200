// The kernel that copies many pieces of memory in one launch, on a device: gradients into a bucket
// and out of it, converted, scaled and looked at on the way.
#pragma once

#include <cstdint>

#include "base/device_runtime.h"

namespace pydist {

// How the bytes of a tile are understood.
enum class TileType : uint8_t { kFloat16, kBFloat16, kFloat32, kFloat64, kBytes };

// One warp's work: a part of one tensor, small enough that many warps share a large one. The table
// that a launch reads is nothing but these, so that a warp needs one read to begin.
struct CopyTile {
  const void* source;  // null: zeros
  void* target;
  int32_t num_elements;
  TileType from;
  TileType to;  // both kBytes, or neither
  uint8_t unused[2];
};
static_assert(sizeof(CopyTile) == 24, "a table is written by memcpy");

struct CopyManyArguments {
  const CopyTile* tiles = nullptr;  // on the device
  int32_t num_tiles = 0;
  int32_t num_partials = 0;
  // Multiplies floating elements, in float32 but between float64s, before they are rounded once.
  double scale = 1;
  // Only of kCopyManyInspect. Set to 1 if any floating element that is written is not finite, else
  // left alone; may be null.
  float* found_nonfinite = nullptr;
  // Gets num_partials numbers, at least one a block, whose sum is that of the squares of the scaled
  // floating elements, in float32: the same for the same tiles and grid. May be null.
  float* partials = nullptr;
};

extern const Kernel kCopyMany;  // bytes stay as they are where types are equal and scale is 1
extern const Kernel kCopyManyInspect;  // looks at every floating element, too

// sum = the sum of `num_partials` numbers, in float64, always in the same order; one block.
struct SumPartialsArguments {
  const float* partials = nullptr;
  float* sum = nullptr;
  int64_t num_partials = 0;
};
extern const Kernel kSumPartials;

// Partial sums of a launch on the current device: as many blocks as fill it.
int num_copy_partials();

// What `num_tiles` tiles need, one warp each.
int num_copy_blocks(int64_t num_tiles);

}  // namespace pydist
