// The conversion kernels against the definition of their types: every half, random bits, every
// length near a vector's, on every instruction set. Buffers are exactly as long as they must be.
#include "collective/convert.h"

#include <cstring>
#include <random>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "half_formats.h"

using namespace pydist;

namespace {

constexpr DType kTypes[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64};

template <class T>
T get(const uint8_t* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof(value));
  return value;
}

double value_at(DType dtype, const std::vector<uint8_t>& bytes, size_t i) {
  const uint8_t* at = bytes.data() + i * dtype_nbytes(dtype);
  if (dtype == DType::kFloat16) return decode(get<uint16_t>(at), kFloat16Format);
  if (dtype == DType::kBFloat16) return decode(get<uint16_t>(at), kBFloat16Format);
  return dtype == DType::kFloat32 ? get<float>(at) : get<double>(at);
}

// What a value becomes, by way of float32.
double rounded(DType to, double value) {
  const auto narrow = static_cast<float>(value);
  if (to == DType::kFloat16) return decode(encode(narrow, kFloat16Format), kFloat16Format);
  if (to == DType::kBFloat16) return decode(encode(narrow, kBFloat16Format), kBFloat16Format);
  return narrow;
}

bool quiet_nan(DType dtype, const std::vector<uint8_t>& bytes, size_t i) {
  const uint8_t* at = bytes.data() + i * dtype_nbytes(dtype);
  if (dtype == DType::kFloat16) return get<uint16_t>(at) >> 9 & 1;
  if (dtype == DType::kBFloat16) return get<uint16_t>(at) >> 6 & 1;
  return true;  // float32 takes a signalling one over from bfloat16, as a shift does
}

void check_conversion(DType from, const std::vector<uint8_t>& source, DType to) {
  const size_t num_elements = source.size() / dtype_nbytes(from);
  for (int isa = 0; isa <= static_cast<int>(detect_isa()); ++isa) {
    std::vector<uint8_t> target(num_elements * dtype_nbytes(to));
    convert(from, source.data(), to, target.data(), num_elements, static_cast<Isa>(isa));
    for (size_t i = 0; i < num_elements; ++i) {
      const double expected = rounded(to, value_at(from, source, i));
      const double found = value_at(to, target, i);
      if (std::isnan(expected)) {
        CHECK(std::isnan(found) && quiet_nan(to, target, i));
      } else {
        CHECK(found == expected && std::signbit(found) == std::signbit(expected));
      }
    }
  }
}

void test_every_half() {
  std::vector<uint16_t> patterns(1 << 16);
  for (size_t i = 0; i < patterns.size(); ++i) patterns[i] = static_cast<uint16_t>(i);
  std::vector<uint8_t> bytes(2 * patterns.size());
  std::memcpy(bytes.data(), patterns.data(), bytes.size());
  for (const DType from : {DType::kFloat16, DType::kBFloat16}) {
    for (const DType to : kTypes) {
      if (to != from) check_conversion(from, bytes, to);
    }
  }
}

// Random bits give every exponent, subnormal numbers, infinities and NaN; bits cut off after those
// that a half type keeps, and the next, give ties.
void test_random_bits() {
  std::mt19937 random(1);
  std::vector<size_t> lengths = {1000};
  for (size_t length = 0; length < 70; ++length) lengths.push_back(length);
  for (const DType from : {DType::kFloat32, DType::kFloat64}) {
    for (const DType to : kTypes) {
      if (to == from) continue;
      for (const size_t length : lengths) {
        std::vector<uint8_t> bytes(length * dtype_nbytes(from));
        for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
        check_conversion(from, bytes, to);
        for (size_t i = 0; i < bytes.size(); ++i) {
          const size_t place = i % dtype_nbytes(from);
          if (place + 3 < dtype_nbytes(from)) bytes[i] = 0;
          if (place + 3 == dtype_nbytes(from)) bytes[i] &= 0x80;
        }
        check_conversion(from, bytes, to);
      }
    }
  }
}

void test_a_type_to_itself_is_a_copy() {
  std::vector<uint8_t> bytes(24);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(201 + i);
  for (const DType dtype : kTypes) {
    std::vector<uint8_t> copy(bytes.size());
    convert(dtype, bytes.data(), dtype, copy.data(), bytes.size() / dtype_nbytes(dtype),
            detect_isa());
    CHECK(copy == bytes);
  }
}

void test_other_types_are_refused() {
  uint8_t bytes[16] = {};
  for (const auto& [from, to] :
       {std::pair{DType::kInt32, DType::kFloat32}, std::pair{DType::kFloat32, DType::kComplex64}}) {
    bool raised = false;
    try {
      convert(from, bytes, to, bytes + 8, 1, Isa::kBaseline);
    } catch (const UsageError&) {
      raised = true;
    }
    CHECK(raised);
  }
}

}  // namespace

int main() {
  test_every_half();
  test_random_bits();
  test_a_type_to_itself_is_a_copy();
  test_other_types_are_refused();
  std::puts("convert_test: passed");
}
