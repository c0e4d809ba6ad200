// The element types of the collectives: their sizes and names.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pydist {

enum class DType : uint8_t {
  kBool,
  kUInt8,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat64,
  kComplex64,
  kComplex128,
};
constexpr int kNumDTypes = 12;

constexpr size_t dtype_nbytes(DType dtype) {
  constexpr size_t kNbytes[kNumDTypes] = {1, 1, 1, 2, 4, 8, 2, 2, 4, 8, 8, 16};
  return kNbytes[static_cast<int>(dtype)];
}

// torch's name.
constexpr const char* dtype_name(DType dtype) {
  constexpr const char* kNames[kNumDTypes] = {"bool",    "uint8",   "int8",      "int16",
                                              "int32",   "int64",   "float16",   "bfloat16",
                                              "float32", "float64", "complex64", "complex128"};
  return kNames[static_cast<int>(dtype)];
}

constexpr bool is_complex(DType dtype) {
  return dtype == DType::kComplex64 || dtype == DType::kComplex128;
}

constexpr bool is_integral(DType dtype) { return dtype <= DType::kInt64; }

}  // namespace pydist
