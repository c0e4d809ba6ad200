// Cuts what is to be copied into the tiles of a table (collective/device_kernels/copy_many.h).
#pragma once

#include <cstdint>
#include <vector>

#include "bucket/pack.h"
#include "collective/device_kernels/copy_many.h"

namespace pydist {

// Bytes of a tile, of the wider type: small enough that `num_warps` warps have several each, and
// within what makes reading the table cheap.
int64_t tile_nbytes_for(const std::vector<PackItem>& items, int64_t num_warps);

int64_t count_tiles(const std::vector<PackItem>& items, int64_t tile_nbytes);

// Writes count_tiles() of them. Raises UsageError for a conversion that is not between real
// floating types, and for floating elements that are not aligned to their size.
void write_tiles(const std::vector<PackItem>& items, int64_t tile_nbytes, CopyTile* tiles);

}  // namespace pydist
