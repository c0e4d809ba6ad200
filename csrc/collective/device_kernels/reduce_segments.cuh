// The body of the kernels that add segments and round once.
//
// A lane takes groups of elements that are as many whole 16-byte accesses in every buffer, adds the
// inputs of the group in its registers, several loads under way, and rounds. Of float8 a group is
// 16 elements, so that eight neighbouring lanes have a block between them and find its largest
// magnitude together.
#pragma once

#include "collective/device_kernels/elements.cuh"
#include "collective/device_kernels/reduce_segments.h"

namespace pydist {

template <class From, class To>
struct ReduceGroup {
  // Three bits of a mantissa need no float64.
  using Wide = std::conditional_t<std::is_same_v<To, Float8>, float, typename From::Wide>;
  static constexpr int kFromNbytes = sizeof(typename From::Bits);
  static constexpr int kToNbytes = sizeof(typename To::Bits);
  static constexpr int kElements =
      kVectorNbytes / (kFromNbytes < kToNbytes ? kFromNbytes : kToNbytes);
  // Inputs whose loads are under way together: 64 bytes a lane.
  static constexpr int kAtOnce = kElements * kFromNbytes >= 64 ? 1 : 64 / (kElements * kFromNbytes);
  // Lanes that share the scale of an output.
  static constexpr int kSharing = kToNbytes == 1 ? kFloat8Block / kElements : 1;

  Wide sums[kElements] = {};
};

template <class From>
__host__ __device__ __forceinline__ const typename From::Bits* segment(
    const ReduceSegmentsArguments& arguments, int k) {
  const void* at = k == arguments.own
                       ? arguments.own_input
                       : static_cast<const char*>(arguments.inputs) + k * arguments.stride_nbytes;
  return static_cast<const typename From::Bits*>(at);
}

__host__ __device__ __forceinline__ float float8_scale(uint8_t byte) {
  return float_of_bits(static_cast<uint32_t>(byte) << 23);  // what is written is 1 to 247
}

// What multiplies the elements of a group as they are widened: the scale of its block, of float8.
template <class From>
__host__ __device__ __forceinline__ float unit_of(const ReduceSegmentsArguments& arguments,
                                                  const typename From::Bits* input, int64_t at) {
  if constexpr (sizeof(typename From::Bits) > 1) return 1;
  const int64_t scales = rounded_up(arguments.num_elements, kFloat8Block);
  return float8_scale(static_cast<uint8_t>(input[scales + at / kFloat8Block]));
}

// As much of a group as there is; `whole` ones of aligned buffers by whole accesses, and float8
// always: it is padded.
template <class From, int kElements>
__host__ __device__ __forceinline__ Packed<From, kElements> load_group(
    const typename From::Bits* input, int64_t at, int64_t num_elements, bool whole) {
  constexpr bool kPadded = sizeof(typename From::Bits) == 1;
  Packed<From, kElements> loaded;
  if (kPadded || whole) {
    loaded.load(input + at);
  } else {
    for (int i = 0; i < kElements; ++i) {
      if (at + i < num_elements) loaded.set(i, input[at + i]);
    }
  }
  return loaded;
}

template <class From, class To>
__host__ __device__ __forceinline__ void sum_and_scale(const ReduceSegmentsArguments& arguments,
                                                       int64_t at, bool whole,
                                                       ReduceGroup<From, To>& group) {
  using Group = ReduceGroup<From, To>;
  using Wide = typename Group::Wide;
  constexpr int kElements = Group::kElements;
  // Adding to -0 changes nothing, not even a sign.
  for (int i = 0; i < kElements; ++i) group.sums[i] = Wide(-0.0f);
  for (int first = 0; first < arguments.num_inputs; first += Group::kAtOnce) {
    Packed<From, kElements> loaded[Group::kAtOnce];
    float units[Group::kAtOnce] = {};
    for (int k = 0; k < Group::kAtOnce; ++k) {
      if (first + k < arguments.num_inputs) {
        const auto* input = segment<From>(arguments, first + k);
        loaded[k] = load_group<From, kElements>(input, at, arguments.num_elements, whole);
        units[k] = unit_of<From>(arguments, input, at);
      }
    }
    for (int k = 0; k < Group::kAtOnce; ++k) {
      if (first + k < arguments.num_inputs) {
        for (int i = 0; i < kElements; ++i) {
          Wide value = static_cast<Wide>(From::widen(loaded[k].get(i)));
          if constexpr (Group::kFromNbytes == 1) value = multiplied(value, units[k]);
          group.sums[i] += value;
        }
      }
    }
  }
  const Wide scale = static_cast<Wide>(arguments.scale);
  for (int i = 0; i < kElements; ++i) group.sums[i] *= scale;
}

template <class To, class Wide>
__host__ __device__ __forceinline__ typename To::Bits round_to(Wide value) {
  // float64 to a half type by way of float32, as everywhere.
  return To::narrow(static_cast<typename To::Wide>(value));
}

template <class From, class To>
__host__ __device__ __forceinline__ void store_group(const ReduceSegmentsArguments& arguments,
                                                     int64_t at, bool whole,
                                                     const ReduceGroup<From, To>& group) {
  constexpr int kElements = ReduceGroup<From, To>::kElements;
  auto* output = static_cast<typename To::Bits*>(arguments.output) + at;
  Packed<To, kElements> packed;
  for (int i = 0; i < kElements; ++i) packed.set(i, round_to<To>(group.sums[i]));
  if (whole) {
    packed.store(output);
    return;
  }
  for (int i = 0; i < kElements; ++i) {
    if (at + i < arguments.num_elements) output[i] = packed.get(i);
  }
}

// ---- float8 outputs

// The largest finite magnitude, as bits: they are ordered as the numbers are.
template <class From, class To>
__host__ __device__ __forceinline__ uint32_t largest_magnitude(const ReduceGroup<From, To>& group) {
  uint32_t largest = 0;
  for (int i = 0; i < ReduceGroup<From, To>::kElements; ++i) {
    const uint32_t magnitude = bits_of_float(static_cast<float>(group.sums[i])) & 0x7fffffffu;
    if (magnitude < Float32::kExponent && magnitude > largest) largest = magnitude;
  }
  return largest;
}

// The exponent of 448 = 1.75 * 2^8 is 8 above that of 1.75.
__host__ __device__ __forceinline__ uint32_t float8_scale_byte(uint32_t largest) {
  const int exponent = static_cast<int>(largest >> 23) - 8 + ((largest & 0x7fffffu) > 0x600000u);
  return exponent < 1 ? 1u : static_cast<uint32_t>(exponent);
}

// The codes and, by one lane, the scale of the block. Past the end there are zeros up to the
// block's end.
template <class From, class To>
__host__ __device__ __forceinline__ void store_float8(const ReduceSegmentsArguments& arguments,
                                                      int64_t at, uint32_t largest,
                                                      const ReduceGroup<From, To>& group) {
  constexpr int kElements = ReduceGroup<From, To>::kElements;
  auto* codes = static_cast<uint8_t*>(arguments.output);
  const uint32_t scale = float8_scale_byte(largest);
  const float inverse = float_of_bits((254u - scale) << 23);
  Packed<To, kElements> packed;
  for (int i = 0; i < kElements; ++i) {
    packed.set(i, Float8::narrow(multiplied(static_cast<float>(group.sums[i]), inverse)));
  }
  packed.store(codes + at);
  if (at % kFloat8Block == 0) {
    codes[rounded_up(arguments.num_elements, kFloat8Block) + at / kFloat8Block] =
        static_cast<uint8_t>(scale);
  }
}

// ---- The loop of a lane: groups in strides of the grid.

template <class From, class To>
__host__ __device__ __forceinline__ int64_t num_groups(const ReduceSegmentsArguments& arguments) {
  using Group = ReduceGroup<From, To>;
  return rounded_up(divided_up(arguments.num_elements, Group::kElements), Group::kSharing);
}

template <class From, class To>
__host__ __device__ __forceinline__ bool are_aligned(const ReduceSegmentsArguments& arguments) {
  return is_aligned(arguments.inputs, kVectorNbytes) &&
         arguments.stride_nbytes % kVectorNbytes == 0 &&
         (arguments.own < 0 || is_aligned(arguments.own_input, kVectorNbytes)) &&
         is_aligned(arguments.output, kVectorNbytes);
}

#if defined(__CUDACC__)

template <class From, class To>
__device__ __forceinline__ void reduce_on_device(const ReduceSegmentsArguments& arguments) {
  using Group = ReduceGroup<From, To>;
  const bool aligned = are_aligned<From, To>(arguments);
  const int64_t count = num_groups<From, To>(arguments);
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kKernelThreads;
  int64_t index = static_cast<int64_t>(blockIdx.x) * kKernelThreads + threadIdx.x;
  for (; index < count; index += stride) {
    const int64_t at = index * Group::kElements;
    const bool whole = aligned && at + Group::kElements <= arguments.num_elements;
    Group group;
    sum_and_scale(arguments, at, whole, group);
    if constexpr (Group::kSharing > 1) {
      uint32_t largest = largest_magnitude(group);
      const uint32_t sharing = 0xffu << (threadIdx.x & 24u);
      for (int distance = Group::kSharing / 2; distance > 0; distance /= 2) {
        largest = max(largest, __shfl_xor_sync(sharing, largest, distance));
      }
      store_float8(arguments, at, largest, group);
    } else {
      store_group(arguments, at, whole, group);
    }
  }
}

#else

// Lanes that share a scale take their turns together, the others one after the other.
template <class From, class To>
void reduce_on_host(const ReduceSegmentsArguments& arguments, int num_blocks) {
  using Group = ReduceGroup<From, To>;
  const bool aligned = are_aligned<From, To>(arguments);
  const int64_t count = num_groups<From, To>(arguments);
  const int64_t stride = static_cast<int64_t>(num_blocks) * kKernelThreads;
  for (int64_t thread = 0; thread < stride; thread += Group::kSharing) {
    for (int64_t index = thread; index < count; index += stride) {
      Group groups[Group::kSharing];
      uint32_t largest = 0;
      for (int lane = 0; lane < Group::kSharing; ++lane) {
        const int64_t at = (index + lane) * Group::kElements;
        const bool whole = aligned && at + Group::kElements <= arguments.num_elements;
        sum_and_scale(arguments, at, whole, groups[lane]);
        if constexpr (Group::kSharing == 1) {
          store_group(arguments, at, whole, groups[lane]);
        } else {
          const uint32_t magnitude = largest_magnitude(groups[lane]);
          largest = magnitude > largest ? magnitude : largest;
        }
      }
      if constexpr (Group::kSharing > 1) {
        for (int lane = 0; lane < Group::kSharing; ++lane) {
          store_float8(arguments, (index + lane) * Group::kElements, largest, groups[lane]);
        }
      }
    }
  }
}

#endif

}  // namespace pydist
