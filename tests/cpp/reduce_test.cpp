// The reduction kernels against a naive loop: every type, operation, instruction set, odd lengths
// and odd addresses.
#include "collective/reduce.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "half_formats.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

using namespace pydist;

namespace {

// One element of any type: at most 16 bytes.
using Element = std::vector<uint8_t>;

template <class T>
T get(const Element& element, int part = 0) {
  T value;
  std::memcpy(&value, element.data() + part * sizeof(T), sizeof(T));
  return value;
}

template <class T>
Element put(std::initializer_list<T> parts) {
  Element element(parts.size() * sizeof(T));
  std::memcpy(element.data(), parts.begin(), element.size());
  return element;
}

template <class T>
T combine(T a, T b, ReduceOp op) {
  if (a != a) return a;
  if (b != b) return b;
  switch (op) {
    case ReduceOp::kMin:
      return b < a ? b : a;
    case ReduceOp::kMax:
      return b > a ? b : a;
    case ReduceOp::kProduct:
      return a * b;
    default:
      return a + b;
  }
}

template <class T>
T naive_float(const std::vector<Element>& inputs, ReduceOp op, T (*load)(const Element&)) {
  T total = load(inputs[0]);
  for (size_t k = 1; k < inputs.size(); ++k) total = combine(total, load(inputs[k]), op);
  return op == ReduceOp::kMean ? total * (T(1) / T(inputs.size())) : total;
}

template <class T, class Wide>
Element naive_integer(const std::vector<Element>& inputs, ReduceOp op) {
  Wide total = get<T>(inputs[0]);
  for (size_t k = 1; k < inputs.size(); ++k) {
    total = static_cast<T>(combine<Wide>(total, get<T>(inputs[k]), op));
  }
  return put<T>({static_cast<T>(total)});
}

Element naive_int64(const std::vector<Element>& inputs, ReduceOp op) {
  if (op == ReduceOp::kMin || op == ReduceOp::kMax)
    return naive_integer<int64_t, int64_t>(inputs, op);
  return naive_integer<uint64_t, uint64_t>(inputs, op);
}

template <class T>
Element naive_complex(const std::vector<Element>& inputs, ReduceOp op) {
  volatile T real = get<T>(inputs[0], 0), imaginary = get<T>(inputs[0], 1);
  for (size_t k = 1; k < inputs.size(); ++k) {
    const T other_real = get<T>(inputs[k], 0), other_imaginary = get<T>(inputs[k], 1);
    if (op == ReduceOp::kProduct) {
      volatile T rr = real * other_real, ii = imaginary * other_imaginary;
      volatile T ri = real * other_imaginary, ir = imaginary * other_real;
      real = rr - ii;
      imaginary = ri + ir;
    } else {
      real = real + other_real;
      imaginary = imaginary + other_imaginary;
    }
  }
  const T scale = op == ReduceOp::kMean ? T(1) / T(inputs.size()) : T(1);
  return put<T>({real * scale, imaginary * scale});
}

Element naive_bool(const std::vector<Element>& inputs, ReduceOp op) {
  const bool is_or = op == ReduceOp::kSum || op == ReduceOp::kMax;
  bool total = !is_or;
  for (const Element& input : inputs) total = is_or ? total || input[0] : total && input[0];
  return {static_cast<uint8_t>(total)};
}

Element naive_bits(const std::vector<Element>& inputs, ReduceOp op) {
  Element total = inputs[0];
  for (size_t k = 1; k < inputs.size(); ++k) {
    for (size_t i = 0; i < total.size(); ++i) {
      const uint8_t byte = inputs[k][i];
      total[i] = op == ReduceOp::kBitAnd  ? total[i] & byte
                 : op == ReduceOp::kBitOr ? total[i] | byte
                                          : total[i] ^ byte;
    }
  }
  return total;
}

Element naive(DType dtype, ReduceOp op, const std::vector<Element>& inputs) {
  if (is_bitwise(op)) return naive_bits(inputs, op);
  switch (dtype) {
    case DType::kBool:
      return naive_bool(inputs, op);
    case DType::kUInt8:
      return naive_integer<uint8_t, int64_t>(inputs, op);
    case DType::kInt8:
      return naive_integer<int8_t, int64_t>(inputs, op);
    case DType::kInt16:
      return naive_integer<int16_t, int64_t>(inputs, op);
    case DType::kInt32:
      return naive_integer<int32_t, int64_t>(inputs, op);
    case DType::kInt64:
      return naive_int64(inputs, op);
    case DType::kFloat16: {
      const auto load = [](const Element& e) {
        return float(decode(get<uint16_t>(e), kFloat16Format));
      };
      return put<uint16_t>({encode(naive_float<float>(inputs, op, load), kFloat16Format)});
    }
    case DType::kBFloat16: {
      const auto load = [](const Element& e) {
        return float(decode(get<uint16_t>(e), kBFloat16Format));
      };
      return put<uint16_t>({encode(naive_float<float>(inputs, op, load), kBFloat16Format)});
    }
    case DType::kFloat32:
      return put<float>(
          {naive_float<float>(inputs, op, [](const Element& e) { return get<float>(e); })});
    case DType::kFloat64:
      return put<double>(
          {naive_float<double>(inputs, op, [](const Element& e) { return get<double>(e); })});
    case DType::kComplex64:
      return naive_complex<float>(inputs, op);
    case DType::kComplex128:
      return naive_complex<double>(inputs, op);
  }
  return {};
}

// Payloads of NaN may differ, since addition may be commuted.
bool same(DType dtype, const Element& a, const Element& b) {
  if (a == b) return true;
  const auto both_nan = [&](auto zero, int parts) {
    using T = decltype(zero);
    for (int part = 0; part < parts; ++part) {
      const T x = get<T>(a, part), y = get<T>(b, part);
      if (std::memcmp(&x, &y, sizeof(T)) != 0 && !(x != x && y != y)) return false;
    }
    return true;
  };
  switch (dtype) {
    case DType::kFloat16:
      return std::isnan(decode(get<uint16_t>(a), kFloat16Format)) &&
             std::isnan(decode(get<uint16_t>(b), kFloat16Format));
    case DType::kBFloat16:
      return std::isnan(decode(get<uint16_t>(a), kBFloat16Format)) &&
             std::isnan(decode(get<uint16_t>(b), kBFloat16Format));
    case DType::kFloat32:
      return both_nan(float{}, 1);
    case DType::kFloat64:
      return both_nan(double{}, 1);
    case DType::kComplex64:
      return both_nan(float{}, 2);
    case DType::kComplex128:
      return both_nan(double{}, 2);
    default:
      return false;
  }
}

// Random bits give every exponent, subnormal numbers, infinities and NaN; small numbers give ties
// and exact sums.
void fill(std::vector<uint8_t>& bytes, DType dtype, std::mt19937& random) {
  for (uint8_t& byte : bytes) byte = dtype == DType::kBool ? random() & 1 : random();
  if (dtype == DType::kFloat32 && random() % 2) {
    for (size_t i = 0; i + 4 <= bytes.size(); i += 4) {
      const float value = static_cast<float>(static_cast<int>(random() % 2001) - 1000) / 7;
      std::memcpy(bytes.data() + i, &value, 4);
    }
  }
}

struct Case {
  DType dtype;
  ReduceOp op;
  int num_inputs;
  int64_t num_elements;
  int misalignment;
  bool in_place;
};

std::vector<uint8_t> run(const Case& c, const std::vector<std::vector<uint8_t>>& values, Isa isa) {
  const size_t nbytes = c.num_elements * dtype_nbytes(c.dtype);
  constexpr size_t kGuard = 64;
  std::vector<std::vector<uint8_t>> buffers;
  std::vector<const void*> inputs;
  std::vector<void*> outputs;
  for (int k = 0; k < c.num_inputs; ++k) {
    buffers.emplace_back(kGuard + c.misalignment + nbytes + kGuard, 0xa5);
    std::copy(values[k].begin(), values[k].end(), buffers[k].begin() + kGuard + c.misalignment);
  }
  if (!c.in_place) buffers.emplace_back(kGuard + c.misalignment + nbytes + kGuard, 0xa5);
  for (auto& buffer : buffers) {
    void* start = buffer.data() + kGuard + c.misalignment;
    if (inputs.size() < static_cast<size_t>(c.num_inputs)) {
      inputs.push_back(start);
      if (c.in_place) outputs.push_back(start);
    } else {
      outputs.push_back(start);
    }
  }
  reduce(c.dtype, c.op,
         {inputs.data(), c.num_inputs, outputs.data(), static_cast<int>(outputs.size()),
          c.num_elements},
         isa);
  const auto* result = static_cast<uint8_t*>(outputs[0]);
  for (void* output : outputs) {
    CHECK(std::equal(result, result + nbytes, static_cast<uint8_t*>(output)));
  }
  for (auto& buffer : buffers) {
    for (size_t i = 0; i < kGuard + c.misalignment; ++i) CHECK(buffer[i] == 0xa5);
    for (size_t i = 0; i < kGuard; ++i) CHECK(buffer[buffer.size() - 1 - i] == 0xa5);
  }
  return {result, result + nbytes};
}

Element element_at(const std::vector<uint8_t>& bytes, size_t i, size_t nbytes) {
  return {bytes.begin() + i * nbytes, bytes.begin() + (i + 1) * nbytes};
}

void test_case(const Case& c, std::mt19937& random) {
  const size_t element_nbytes = dtype_nbytes(c.dtype);
  std::vector<std::vector<uint8_t>> values(c.num_inputs);
  for (auto& bytes : values) {
    bytes.resize(c.num_elements * element_nbytes);
    fill(bytes, c.dtype, random);
  }
  std::vector<Element> expected;
  for (int64_t i = 0; i < c.num_elements; ++i) {
    std::vector<Element> inputs;
    for (const auto& bytes : values) inputs.push_back(element_at(bytes, i, element_nbytes));
    expected.push_back(naive(c.dtype, c.op, inputs));
  }
  for (int isa = 0; isa <= static_cast<int>(detect_isa()); ++isa) {
    const std::vector<uint8_t> result = run(c, values, static_cast<Isa>(isa));
    for (int64_t i = 0; i < c.num_elements; ++i) {
      const Element found = element_at(result, i, element_nbytes);
      if (same(c.dtype, found, expected[i])) continue;
      std::fprintf(stderr, "%s of %s, %d inputs, element %ld of %ld, isa %d:", reduce_op_name(c.op),
                   dtype_name(c.dtype), c.num_inputs, long(i), long(c.num_elements), isa);
      for (uint8_t byte : found) std::fprintf(stderr, " %02x", byte);
      std::fprintf(stderr, ", expected");
      for (uint8_t byte : expected[i]) std::fprintf(stderr, " %02x", byte);
      std::fprintf(stderr, "\n");
      CHECK(false);
    }
  }
}

void test_against_naive() {
  std::mt19937 random(1);
  for (int d = 0; d < kNumDTypes; ++d) {
    for (int o = 0; o < kNumReduceOps; ++o) {
      const auto dtype = static_cast<DType>(d);
      const auto op = static_cast<ReduceOp>(o);
      if (why_not_reducible(dtype, op) != nullptr) continue;
      for (int num_inputs : {1, 2, 3, 4, 8}) {
        for (int64_t num_elements : {0, 1, 2, 3, 7, 15, 16, 17, 33, 63, 64, 65, 129, 300, 521}) {
          const bool in_place = random() % 2;
          const int misalignment = dtype_nbytes(dtype) * (random() % 8);
          test_case({dtype, op, num_inputs, num_elements, misalignment, in_place}, random);
        }
      }
    }
  }
}

// Every value of a 16-bit type passes through the accumulator and comes back.
void test_every_half() {
  for (DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    const HalfFormat format = dtype == DType::kFloat16 ? kFloat16Format : kBFloat16Format;
    std::vector<uint16_t> values(1 << 16), result(1 << 16);
    for (size_t i = 0; i < values.size(); ++i) values[i] = i;
    const void* inputs[] = {values.data()};
    void* outputs[] = {result.data()};
    for (int isa = 0; isa <= static_cast<int>(detect_isa()); ++isa) {
      reduce(dtype, ReduceOp::kSum, {inputs, 1, outputs, 1, 1 << 16}, static_cast<Isa>(isa));
      for (size_t i = 0; i < values.size(); ++i) {
        if (std::isnan(decode(values[i], format))) {
          CHECK(std::isnan(decode(result[i], format)));
        } else {
          CHECK(result[i] == values[i]);
        }
      }
    }
  }
}

void test_mean_of_extremes() {
  for (double value : {40000.0, std::ldexp(1.0, -24)}) {
    uint16_t a = encode(value, kFloat16Format), b = a;
    const void* inputs[] = {&a, &b};
    void* outputs[] = {&a, &b};
    reduce(DType::kFloat16, ReduceOp::kMean, {inputs, 2, outputs, 2, 1}, detect_isa());
    CHECK(decode(a, kFloat16Format) == value);
    CHECK(decode(b, kFloat16Format) == value);
  }
}

// A mean over fewer than gave, the others being zeros.
void test_divisor() {
  for (int isa = 0; isa <= static_cast<int>(detect_isa()); ++isa) {
    std::vector<float> a(70, 3.0f), b(70, 4.0f), c(70, 0.0f);
    const void* inputs[] = {a.data(), b.data(), c.data()};
    void* outputs[] = {a.data()};
    reduce(DType::kFloat32, ReduceOp::kMean, {inputs, 3, outputs, 1, 70, 2}, static_cast<Isa>(isa));
    for (const float mean : a) CHECK(mean == 3.5f);
  }
}

void test_refusals() {
  float value = 0;
  const void* inputs[] = {&value};
  void* outputs[] = {&value};
  for (auto [dtype, op] : {std::pair{DType::kInt64, ReduceOp::kMean},
                           {DType::kBool, ReduceOp::kMean},
                           {DType::kComplex64, ReduceOp::kMin},
                           {DType::kComplex128, ReduceOp::kMax}}) {
    bool raised = false;
    try {
      reduce(dtype, op, {inputs, 1, outputs, 1, 1}, Isa::kBaseline);
    } catch (const UsageError&) {
      raised = true;
    }
    CHECK(raised);
  }
}

// The caller's flush-to-zero neither changes a result nor is lost.
void test_float_control() {
#if defined(__x86_64__)
  const unsigned saved = _mm_getcsr();
  _mm_setcsr(saved | 0x8040 | 0x6000);  // flush, subnormals are zero, round towards zero
  const unsigned set = _mm_getcsr();
  float tiny = std::ldexp(1.0f, -140), other = tiny;
  const void* inputs[] = {&tiny, &other};
  void* outputs[] = {&tiny};
  reduce(DType::kFloat32, ReduceOp::kSum, {inputs, 2, outputs, 1, 1}, detect_isa());
  CHECK((_mm_getcsr() & ~0x3fu) == (set & ~0x3fu));
  _mm_setcsr(saved);
  CHECK(tiny == std::ldexp(1.0f, -139));
#endif
}

}  // namespace

int main() {
  test_every_half();
  test_mean_of_extremes();
  test_divisor();
  test_refusals();
  test_float_control();
  test_against_naive();
  std::puts("reduce_test: passed");
}
