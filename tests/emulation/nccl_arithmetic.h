// How NCCL reduces: in the type itself, rounding after every addition; here in the order of ranks.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "../cpp/half_formats.h"
#include "nccl_step.h"

namespace pydist::emulation {

// Halves as they lie in memory; arithmetic goes over double, which holds the sum and the product of
// two of them exactly, and rounds once.
template <const HalfFormat& kFormat>
struct Half {
  uint16_t bits;
  Half() = default;
  Half(double value) : bits(encode(value, kFormat)) {}
  operator double() const { return decode(bits, kFormat); }
};
using Float16 = Half<kFloat16Format>;
using BFloat16 = Half<kBFloat16Format>;

template <class T>
T combine(T left, T right, int op) {
  using Wide = std::conditional_t<std::is_arithmetic_v<T>, T, double>;
  const Wide a = left;
  const Wide b = right;
  switch (op) {
    case nccl::kProd:
      return static_cast<T>(a * b);
    case nccl::kMax:
      return static_cast<T>(a < b ? b : a);
    case nccl::kMin:
      return static_cast<T>(b < a ? b : a);
    default:
      return static_cast<T>(a + b);
  }
}

template <class T>
T load(const void* data, size_t i) {
  T value;
  std::memcpy(&value, static_cast<const char*>(data) + i * sizeof(T), sizeof(T));
  return value;
}

// What a rank brings in: a mean of floating types multiplies before it adds.
template <class T>
void scale_as(const void* from, void* to, size_t count, double scale) {
  using Wide = std::conditional_t<std::is_arithmetic_v<T>, T, double>;
  const Wide factor = static_cast<T>(scale);
  for (size_t i = 0; i < count; ++i) {
    const T product = static_cast<T>(static_cast<Wide>(load<T>(from, i)) * factor);
    std::memcpy(static_cast<char*>(to) + i * sizeof(T), &product, sizeof(T));
  }
}

// A mean of integers divides afterwards.
template <class T>
void reduce_as(const std::vector<const char*>& inputs, void* output, size_t count, int op) {
  for (size_t i = 0; i < count; ++i) {
    T sum = load<T>(inputs[0], i);
    for (size_t rank = 1; rank < inputs.size(); ++rank) {
      sum = combine(sum, load<T>(inputs[rank], i), op);
    }
    if constexpr (std::is_integral_v<T>) {
      if (op == nccl::kAvg) sum = static_cast<T>(sum / static_cast<int64_t>(inputs.size()));
    }
    std::memcpy(static_cast<char*>(output) + i * sizeof(T), &sum, sizeof(T));
  }
}

// What `use` gives for a value of that type.
template <class Use>
void with_type(nccl::DataType dtype, const Use& use) {
  switch (dtype) {
    case nccl::kInt8:
      return use(int8_t{});
    case nccl::kUint8:
      return use(uint8_t{});
    case nccl::kInt32:
      return use(int32_t{});
    case nccl::kUint32:
      return use(uint32_t{});
    case nccl::kInt64:
      return use(int64_t{});
    case nccl::kUint64:
      return use(uint64_t{});
    case nccl::kFloat16:
      return use(Float16{});
    case nccl::kFloat32:
      return use(float{});
    case nccl::kFloat64:
      return use(double{});
    case nccl::kBfloat16:
      return use(BFloat16{});
  }
}

}  // namespace pydist::emulation
