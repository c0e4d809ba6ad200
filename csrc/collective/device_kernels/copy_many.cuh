// The bodies of the kernels that copy many pieces of memory in one launch.
//
// A warp takes tiles in strides of the grid. Within a tile it moves whole 16-byte accesses where
// source and target can be aligned together, several under way in every lane, and single elements
// before, after and elsewhere:
//
//   target  ....|================|================|===.        | multiples of 16 bytes
//           head       groups, one after the other by lane      tail
#pragma once

#include "collective/device_kernels/copy_many.h"
#include "collective/device_kernels/elements.cuh"

namespace pydist {

// What a lane has seen of the elements it wrote.
struct Inspection {
  float sum_of_squares = 0;
  bool nonfinite = false;
};

// ---- Bytes

template <class Unit>
__host__ __device__ __forceinline__ void copy_units(const CopyTile& tile, int64_t begin,
                                                    int64_t end, int lane) {
  constexpr int kAtOnce = 4;
  const auto* source = static_cast<const char*>(tile.source);
  auto* target = static_cast<char*>(tile.target);
  const int count = static_cast<int>((end - begin) / static_cast<int64_t>(sizeof(Unit)));
  for (int first = lane; first < count; first += kAtOnce * kLanes) {
    Unit units[kAtOnce] = {};
    for (int u = 0; u < kAtOnce; ++u) {
      const int64_t at = begin + static_cast<int64_t>(first + u * kLanes) * sizeof(Unit);
      if (source != nullptr && first + u * kLanes < count) {
        units[u] = load_aligned<Unit>(source + at);
      }
    }
    for (int u = 0; u < kAtOnce; ++u) {
      const int64_t at = begin + static_cast<int64_t>(first + u * kLanes) * sizeof(Unit);
      if (first + u * kLanes < count) store_aligned<Unit>(target + at, units[u]);
    }
  }
}

// Head and tail byte by byte, between them units that are aligned in both.
template <class Unit>
__host__ __device__ __forceinline__ void copy_aligned_units(const CopyTile& tile, int64_t nbytes,
                                                            int lane) {
  const int64_t unit = sizeof(Unit);
  const int64_t misaligned = reinterpret_cast<uintptr_t>(tile.target) % unit;
  const int64_t to_boundary = misaligned == 0 ? 0 : unit - misaligned;
  const int64_t head = to_boundary < nbytes ? to_boundary : nbytes;
  const int64_t middle_end = head + (nbytes - head) / unit * unit;
  if (head > 0) copy_units<uint8_t>(tile, 0, head, lane);
  copy_units<Unit>(tile, head, middle_end, lane);
  if (middle_end < nbytes) copy_units<uint8_t>(tile, middle_end, nbytes, lane);
}

__host__ __device__ __forceinline__ void copy_bytes(const CopyTile& tile, int64_t nbytes,
                                                    int lane) {
  const uintptr_t apart = tile.source == nullptr ? 0
                                                 : reinterpret_cast<uintptr_t>(tile.source) ^
                                                       reinterpret_cast<uintptr_t>(tile.target);
  if (apart % 16 == 0) {
    copy_aligned_units<Vector16>(tile, nbytes, lane);
  } else if (apart % 4 == 0) {
    copy_aligned_units<uint32_t>(tile, nbytes, lane);
  } else if (apart % 2 == 0) {
    copy_aligned_units<uint16_t>(tile, nbytes, lane);
  } else {
    copy_units<uint8_t>(tile, 0, nbytes, lane);
  }
}

// ---- Elements

template <class From, class To>
struct Conversion {
  // Between float64s in float64, else in float32: also of float64 and a half type, as torch does.
  using Wide = std::conditional_t<std::is_same_v<From, Float64> && std::is_same_v<To, Float64>,
                                  double, float>;
  static constexpr int kFromNbytes = sizeof(typename From::Bits);
  static constexpr int kToNbytes = sizeof(typename To::Bits);
  static constexpr int kGroup = kVectorNbytes / (kFromNbytes < kToNbytes ? kFromNbytes : kToNbytes);
  static constexpr int kGroupNbytes = kGroup * (kFromNbytes > kToNbytes ? kFromNbytes : kToNbytes);
  static constexpr int kGroupsAtOnce = kGroupNbytes >= 64 ? 1 : 64 / kGroupNbytes;
};

template <class From, class To, bool kInspects>
__host__ __device__ __forceinline__ typename To::Bits convert_element(typename From::Bits bits,
                                                                      double scale,
                                                                      Inspection& inspection) {
  using Wide = typename Conversion<From, To>::Wide;
  const Wide value = static_cast<Wide>(From::widen(bits)) * static_cast<Wide>(scale);
  const typename To::Bits written = To::narrow(static_cast<typename To::Wide>(value));
  if constexpr (kInspects) {
    const float squared = static_cast<float>(value);
#if defined(__CUDA_ARCH__)
    inspection.sum_of_squares = __fmaf_rn(squared, squared, inspection.sum_of_squares);
#else
    inspection.sum_of_squares = __builtin_fmaf(squared, squared, inspection.sum_of_squares);
#endif
    inspection.nonfinite |= (written & To::kExponent) == To::kExponent;
  }
  (void)inspection;
  return written;
}

template <class From, class To, bool kInspects>
__host__ __device__ __forceinline__ void convert_singly(const CopyTile& tile, int begin, int end,
                                                        double scale, int lane,
                                                        Inspection& inspection) {
  constexpr int kAtOnce = 4;
  const auto* source = static_cast<const typename From::Bits*>(tile.source);
  auto* target = static_cast<typename To::Bits*>(tile.target);
  for (int first = begin + lane; first < end; first += kAtOnce * kLanes) {
    typename From::Bits bits[kAtOnce] = {};
    for (int u = 0; u < kAtOnce; ++u) {
      if (first + u * kLanes < end) {
        bits[u] = load_aligned<typename From::Bits>(source + first + u * kLanes);
      }
    }
    for (int u = 0; u < kAtOnce; ++u) {
      if (first + u * kLanes < end) {
        store_aligned<typename To::Bits>(
            target + first + u * kLanes,
            convert_element<From, To, kInspects>(bits[u], scale, inspection));
      }
    }
  }
}

template <class From, class To, bool kInspects>
__host__ __device__ __forceinline__ void convert_groups(const CopyTile& tile, int begin,
                                                        int num_groups, double scale, int lane,
                                                        Inspection& inspection) {
  using Shape = Conversion<From, To>;
  constexpr int kGroup = Shape::kGroup;
  constexpr int kAtOnce = Shape::kGroupsAtOnce;
  const auto* source = static_cast<const typename From::Bits*>(tile.source) + begin;
  auto* target = static_cast<typename To::Bits*>(tile.target) + begin;
  for (int first = lane; first < num_groups; first += kAtOnce * kLanes) {
    Packed<From, kGroup> loaded[kAtOnce];
    for (int u = 0; u < kAtOnce; ++u) {
      const int group = first + u * kLanes;
      if (group < num_groups) loaded[u].load(source + group * kGroup);
    }
    for (int u = 0; u < kAtOnce; ++u) {
      const int group = first + u * kLanes;
      if (group < num_groups) {
        Packed<To, kGroup> packed;
        for (int i = 0; i < kGroup; ++i) {
          packed.set(i, convert_element<From, To, kInspects>(loaded[u].get(i), scale, inspection));
        }
        packed.store(target + group * kGroup);
      }
    }
  }
}

template <class From, class To, bool kInspects>
__host__ __device__ __forceinline__ void convert_tile(const CopyTile& tile, double scale, int lane,
                                                      Inspection& inspection) {
  using Shape = Conversion<From, To>;
  const int count = tile.num_elements;
  const int misaligned = static_cast<int>(reinterpret_cast<uintptr_t>(tile.target) % kVectorNbytes);
  const int to_boundary = misaligned == 0 ? 0 : (kVectorNbytes - misaligned) / Shape::kToNbytes;
  const int head = to_boundary < count ? to_boundary : count;
  const auto* source = static_cast<const typename From::Bits*>(tile.source);
  const int num_groups =
      is_aligned(source + head, kVectorNbytes) ? (count - head) / Shape::kGroup : 0;
  const int tail = head + num_groups * Shape::kGroup;
  convert_groups<From, To, kInspects>(tile, head, num_groups, scale, lane, inspection);
  if (num_groups > 0 && head > 0) {
    convert_singly<From, To, kInspects>(tile, 0, head, scale, lane, inspection);
  }
  const int rest = num_groups > 0 ? tail : 0;
  if (rest < count) {
    convert_singly<From, To, kInspects>(tile, rest, count, scale, lane, inspection);
  }
}

template <class From, bool kInspects>
__host__ __device__ __forceinline__ void convert_tile_from(const CopyTile& tile, double scale,
                                                           int lane, Inspection& inspection) {
  switch (tile.to) {
    case TileType::kFloat16:
      return convert_tile<From, Float16, kInspects>(tile, scale, lane, inspection);
    case TileType::kBFloat16:
      return convert_tile<From, BFloat16, kInspects>(tile, scale, lane, inspection);
    case TileType::kFloat32:
      return convert_tile<From, Float32, kInspects>(tile, scale, lane, inspection);
    default:
      return convert_tile<From, Float64, kInspects>(tile, scale, lane, inspection);
  }
}

__host__ __device__ __forceinline__ int tile_type_nbytes(TileType type) {
  switch (type) {
    case TileType::kBytes:
      return 1;
    case TileType::kFloat32:
      return 4;
    case TileType::kFloat64:
      return 8;
    default:
      return 2;
  }
}

template <bool kInspects>
__host__ __device__ __forceinline__ void copy_tile(const CopyTile& tile, double scale, int lane,
                                                   Inspection& inspection) {
  if (tile.source == nullptr || tile.to == TileType::kBytes ||
      (!kInspects && scale == 1 && tile.from == tile.to)) {
    const int64_t nbytes = static_cast<int64_t>(tile.num_elements) * tile_type_nbytes(tile.to);
    return copy_bytes(tile, nbytes, lane);
  }
  switch (tile.from) {
    case TileType::kFloat16:
      return convert_tile_from<Float16, kInspects>(tile, scale, lane, inspection);
    case TileType::kBFloat16:
      return convert_tile_from<BFloat16, kInspects>(tile, scale, lane, inspection);
    case TileType::kFloat32:
      return convert_tile_from<Float32, kInspects>(tile, scale, lane, inspection);
    default:
      return convert_tile_from<Float64, kInspects>(tile, scale, lane, inspection);
  }
}

// ---- A thread's share

template <bool kInspects>
__host__ __device__ __forceinline__ Inspection copy_tiles(const CopyManyArguments& arguments,
                                                          int block, int num_blocks, int thread) {
  Inspection inspection;
  const int stride = num_blocks * kWarpsPerBlock;
  for (int t = block * kWarpsPerBlock + thread / kLanes; t < arguments.num_tiles; t += stride) {
    copy_tile<kInspects>(arguments.tiles[t], arguments.scale, thread % kLanes, inspection);
  }
  if (kInspects && inspection.nonfinite && arguments.found_nonfinite != nullptr) {
    *arguments.found_nonfinite = 1;
  }
  return inspection;
}

// Partial sums of blocks that this grid lacks are 0.
__host__ __device__ __forceinline__ void store_partial(const CopyManyArguments& arguments,
                                                       int block, int num_blocks, float sum) {
  for (int p = block; p < arguments.num_partials; p += num_blocks) {
    arguments.partials[p] = p == block ? sum : 0;
  }
}

// ---- Partial sums

__host__ __device__ __forceinline__ double sum_strided(const SumPartialsArguments& arguments,
                                                       int thread) {
  double sum = 0;
  for (int64_t p = thread; p < arguments.num_partials; p += kKernelThreads) {
    sum += arguments.partials[p];
  }
  return sum;
}

}  // namespace pydist
