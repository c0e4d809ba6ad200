// The device's kernels, run on the host, in buffers that are exactly as long as they must be: at
// every alignment, of every pair of types, against conversion by the types' definition.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "bucket/copy_tiles.h"
#include "check.h"
#include "collective/device_kernels/copy_many.h"
#include "collective/device_kernels/reduce_segments.h"
#include "half_formats.h"

using namespace pydist;

namespace {

constexpr DType kTypes[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64};

std::mt19937 random_number(1);

// Memory of its own, which ends right after the last byte and begins at a chosen alignment.
class Exact {
 public:
  Exact(size_t nbytes, size_t offset) : memory_(offset + nbytes), offset_(offset) {
    for (uint8_t& byte : memory_) byte = static_cast<uint8_t>(random_number());
  }
  uint8_t* data() { return memory_.data() + offset_; }

 private:
  std::vector<uint8_t> memory_;
  size_t offset_;
};

double value_at(DType dtype, const uint8_t* bytes, int64_t i) {
  const uint8_t* at = bytes + i * static_cast<int64_t>(dtype_nbytes(dtype));
  uint16_t half;
  std::memcpy(&half, at, sizeof(half));
  if (dtype == DType::kFloat16) return decode(half, kFloat16Format);
  if (dtype == DType::kBFloat16) return decode(half, kBFloat16Format);
  float single;
  std::memcpy(&single, at, sizeof(single));
  if (dtype == DType::kFloat32) return single;
  double both;
  std::memcpy(&both, at, sizeof(both));
  return both;
}

// What a value becomes, by way of float32 but from float64 to itself.
double rounded(DType from, DType to, double value) {
  if (from == DType::kFloat64 && to == DType::kFloat64) return value;
  const auto narrow = static_cast<float>(value);
  if (to == DType::kFloat16) return decode(encode(narrow, kFloat16Format), kFloat16Format);
  if (to == DType::kBFloat16) return decode(encode(narrow, kBFloat16Format), kBFloat16Format);
  return narrow;
}

void check_value(double found, double expected) {
  if (std::isnan(expected)) {
    CHECK(std::isnan(found));
  } else {
    CHECK(found == expected && std::signbit(found) == std::signbit(expected));
  }
}

void copy(const std::vector<PackItem>& items, bool inspects) {
  const int64_t tile_nbytes = tile_nbytes_for(items, 4);
  std::vector<CopyTile> tiles(static_cast<size_t>(count_tiles(items, tile_nbytes)));
  write_tiles(items, tile_nbytes, tiles.data());
  float found = 0;
  std::vector<float> partials(3);
  CopyManyArguments arguments;
  arguments.tiles = tiles.data();
  arguments.num_tiles = static_cast<int32_t>(tiles.size());
  if (inspects) {
    arguments.found_nonfinite = &found;
    arguments.partials = partials.data();
    arguments.num_partials = static_cast<int32_t>(partials.size());
  }
  (inspects ? kCopyManyInspect : kCopyMany).run_on_host(&arguments, 2);
}

void test_copies_of_every_type_and_alignment() {
  for (const DType from : kTypes) {
    for (const DType to : kTypes) {
      for (size_t offset = 0; offset < 16;
           offset += std::min(dtype_nbytes(from), dtype_nbytes(to))) {
        const size_t source_offset = offset / dtype_nbytes(from) * dtype_nbytes(from);
        const size_t target_offset = offset / dtype_nbytes(to) * dtype_nbytes(to);
        const auto count = static_cast<int64_t>(random_number() % 700);
        Exact source(count * dtype_nbytes(from), source_offset);
        Exact target(count * dtype_nbytes(to), target_offset);
        copy({{source.data(), from, target.data(), to, count}}, offset % 4 == 0);
        for (int64_t i = 0; i < count; ++i) {
          check_value(value_at(to, target.data(), i),
                      rounded(from, to, value_at(from, source.data(), i)));
        }
      }
    }
  }
}

void test_bytes_at_every_alignment() {
  for (size_t source_offset = 0; source_offset < 16; ++source_offset) {
    for (size_t target_offset = 0; target_offset < 16; ++target_offset) {
      const size_t count = random_number() % 9000;
      Exact source(count, source_offset);
      Exact target(count, target_offset);
      copy({{source.data(), DType::kUInt8, target.data(), DType::kUInt8,
             static_cast<int64_t>(count)}},
           false);
      CHECK(std::equal(source.data(), source.data() + count, target.data()));
      copy({{nullptr, DType::kUInt8, target.data(), DType::kUInt8, static_cast<int64_t>(count)}},
           true);
      CHECK(std::all_of(target.data(), target.data() + count, [](uint8_t b) { return b == 0; }));
    }
  }
}

Element element_at(int e) { return static_cast<Element>(e); }

// Of random bits, each segment memory of its own where one stands alone.
void test_segments_of_every_type() {
  for (int pair = 0; pair < kNumElements * kNumElements; ++pair) {
    const Element from = element_at(pair / kNumElements);
    const Element to = element_at(pair % kNumElements);
    for (const int num_inputs : {1, 2, 5}) {
      for (const size_t offset : {size_t{0}, size_t{8}}) {
        const auto count = static_cast<int64_t>(random_number() % 3000);
        const bool any_float8 = from == Element::kFloat8 || to == Element::kFloat8;
        const int64_t nbytes = (element_nbytes(from, count) + 15) / 16 * 16;
        Exact inputs(num_inputs * nbytes, any_float8 ? 0 : offset);
        Exact own(element_nbytes(from, count), any_float8 ? 0 : offset);
        Exact output(element_nbytes(to, count), any_float8 ? 0 : offset);
        ReduceSegmentsArguments arguments;
        arguments.inputs = inputs.data();
        arguments.stride_nbytes = nbytes;
        arguments.own_input = own.data();
        arguments.own = num_inputs - 1;
        arguments.num_inputs = num_inputs;
        arguments.output = output.data();
        arguments.num_elements = count;
        arguments.scale = 0.5;
        reduce_segments_kernel(from, to).run_on_host(&arguments, 3);
      }
    }
  }
}

double decoded(const std::vector<uint8_t>& buffer, int64_t count, int64_t i) {
  const int code = buffer[i] & 0x7f;
  const double sign = buffer[i] & 0x80 ? -1 : 1;
  if (code == 0x7f) return std::nan("");
  const int exponent = code >> 3;
  const int mantissa = (code & 7) + (exponent > 0 ? 8 : 0);
  const int scale = buffer[float8_scales_offset(count) + i / kFloat8Block] - 127;
  return sign * std::ldexp(mantissa, std::max(exponent, 1) - 10 + scale);
}

// Every value is within half a unit of the last of four bits, or within half the smallest step of
// its block; what is not finite is NaN.
void test_float8_error() {
  for (const int64_t count : {1, 100, 128, 1000, 5000}) {
    std::vector<float> values(count);
    for (float& value : values) {
      const auto bits = static_cast<uint32_t>(random_number());
      std::memcpy(&value, &bits, sizeof(value));
    }
    std::vector<uint8_t> buffer(float8_nbytes(count));
    ReduceSegmentsArguments arguments;
    arguments.inputs = values.data();
    arguments.output = buffer.data();
    arguments.num_elements = count;
    reduce_segments_kernel(Element::kFloat32, Element::kFloat8).run_on_host(&arguments, 1);
    for (int64_t i = 0; i < count; ++i) {
      const double found = decoded(buffer, count, i);
      if (!std::isfinite(values[i])) {
        CHECK(std::isnan(found));
        continue;
      }
      float largest = 0;
      const int64_t begin = i / kFloat8Block * kFloat8Block;
      for (int64_t j = begin; j < std::min(begin + kFloat8Block, count); ++j) {
        if (std::isfinite(values[j])) largest = std::max(largest, std::fabs(values[j]));
      }
      const double step = std::max(std::ldexp(double{largest}, -8 - 8), std::ldexp(1.0, -126 - 9));
      CHECK(std::fabs(found - values[i]) <= std::max(std::fabs(values[i]) / 16.0, step / 2));
    }
  }
}

void test_accesses_cover_what_is_touched() {
  ReduceSegmentsArguments arguments;
  std::vector<uint8_t> inputs(3 * 512);
  std::vector<float> own(100);
  std::vector<uint8_t> output(float8_nbytes(100));
  arguments.inputs = inputs.data();
  arguments.stride_nbytes = 512;
  arguments.own_input = own.data();
  arguments.own = 1;
  arguments.num_inputs = 3;
  arguments.output = output.data();
  arguments.num_elements = 100;
  std::vector<const void*> read;
  size_t written_nbytes = 0;
  reduce_segments_kernel(Element::kFloat32, Element::kFloat8)
      .visit_accesses(&arguments, [&](Access access, const void* data, size_t nbytes) {
        if (access == Access::kRead) {
          CHECK(nbytes == 400);
          read.push_back(data);
        } else {
          CHECK(data == output.data());
          written_nbytes += nbytes;
        }
      });
  CHECK((read == std::vector<const void*>{inputs.data(), own.data(), inputs.data() + 1024}));
  CHECK(written_nbytes == output.size());
}

}  // namespace

int main() {
  test_copies_of_every_type_and_alignment();
  test_bytes_at_every_alignment();
  test_segments_of_every_type();
  test_float8_error();
  test_accesses_cover_what_is_touched();
  std::puts("device_kernels_test: passed");
}
