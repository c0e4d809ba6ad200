#include "bucket/copy_tiles.h"

#include <algorithm>

#include "base/check.h"
#include "collective/convert.h"

namespace pydist {

namespace {

constexpr int64_t kSmallestTileNbytes = 4 << 10;  // two turns of a warp's lanes
constexpr int64_t kLargestTileNbytes = 64 << 10;
constexpr int64_t kTilesPerWarp = 4;

// One item as the kernel sees it: complex elements are two real ones, integers are bytes.
struct Span {
  TileType from;
  TileType to;
  int64_t num_elements;
  int64_t from_nbytes;
  int64_t to_nbytes;
};

TileType tile_type(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return TileType::kFloat16;
    case DType::kBFloat16:
      return TileType::kBFloat16;
    case DType::kFloat32:
    case DType::kComplex64:
      return TileType::kFloat32;
    case DType::kFloat64:
    case DType::kComplex128:
      return TileType::kFloat64;
    default:
      return TileType::kBytes;
  }
}

Span span_of(const PackItem& item) {
  PYDIST_CHECK(item.from == item.to || (is_convertible(item.from) && is_convertible(item.to)),
               UsageError, dtype_name(item.from), " to ", dtype_name(item.to),
               " is not a conversion between floating types");
  const auto from_nbytes = static_cast<int64_t>(dtype_nbytes(item.from));
  const auto to_nbytes = static_cast<int64_t>(dtype_nbytes(item.to));
  if (is_integral(item.to)) {
    return {TileType::kBytes, TileType::kBytes, item.num_elements * to_nbytes, 1, 1};
  }
  const int64_t parts = is_complex(item.to) ? 2 : 1;
  return {tile_type(item.from), tile_type(item.to), item.num_elements * parts, from_nbytes / parts,
          to_nbytes / parts};
}

int64_t tile_elements(const Span& span, int64_t tile_nbytes) {
  return tile_nbytes / std::max(span.from_nbytes, span.to_nbytes);
}

void check_alignment(const PackItem& item, const Span& span) {
  const auto source = reinterpret_cast<uintptr_t>(item.source);
  const auto target = reinterpret_cast<uintptr_t>(item.target);
  PYDIST_CHECK(source % span.from_nbytes == 0 && target % span.to_nbytes == 0, UsageError,
               "a device copies ", dtype_name(item.from), " to ", dtype_name(item.to),
               " only between addresses that are multiples of their sizes; found ", item.source,
               " and ", item.target);
}

}  // namespace

int64_t tile_nbytes_for(const std::vector<PackItem>& items, int64_t num_warps) {
  int64_t nbytes = 0;
  for (const PackItem& item : items) {
    const Span span = span_of(item);
    nbytes += span.num_elements * std::max(span.from_nbytes, span.to_nbytes);
  }
  int64_t tile_nbytes = kSmallestTileNbytes;
  while (tile_nbytes < kLargestTileNbytes &&
         2 * tile_nbytes * num_warps * kTilesPerWarp <= nbytes) {
    tile_nbytes *= 2;
  }
  return tile_nbytes;
}

int64_t count_tiles(const std::vector<PackItem>& items, int64_t tile_nbytes) {
  int64_t count = 0;
  for (const PackItem& item : items) {
    const Span span = span_of(item);
    const int64_t size = tile_elements(span, tile_nbytes);
    count += (span.num_elements + size - 1) / size;
  }
  return count;
}

void write_tiles(const std::vector<PackItem>& items, int64_t tile_nbytes, CopyTile* tiles) {
  for (const PackItem& item : items) {
    const Span span = span_of(item);
    if (span.num_elements > 0) check_alignment(item, span);
    const int64_t size = tile_elements(span, tile_nbytes);
    const auto* source = static_cast<const char*>(item.source);
    auto* target = static_cast<char*>(item.target);
    for (int64_t begin = 0; begin < span.num_elements; begin += size) {
      const int64_t count = std::min(size, span.num_elements - begin);
      *tiles++ = {source == nullptr ? nullptr : source + begin * span.from_nbytes,
                  target + begin * span.to_nbytes,
                  static_cast<int32_t>(count),
                  span.from,
                  span.to,
                  {}};
    }
  }
}

}  // namespace pydist
