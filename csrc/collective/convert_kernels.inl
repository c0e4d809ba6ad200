// The conversion kernels, compiled once per instruction set: included after reduce_kernels.inl,
// whose elements they load and store, under the same rules.

namespace pydist {
namespace {

// float64 by way of float32, as torch converts it to and from half types.
struct Double {
  using Vector = FloatVector;
  static constexpr int kNbytes = 8;
  static constexpr int kLanes = kFloatLanes;
  typedef double Doubles __attribute__((vector_size(2 * kVectorNbytes)));
  static inline Vector load(const void* from) {
    Doubles doubles;
    __builtin_memcpy(&doubles, from, sizeof(doubles));
    return __builtin_convertvector(doubles, Vector);
  }
  static inline void store(void* to, Vector vector) {
    const Doubles doubles = __builtin_convertvector(vector, Doubles);
    __builtin_memcpy(to, &doubles, sizeof(doubles));
  }
};

template <class From, class To>
__attribute__((noinline)) void convert_elements(const ConvertArgs& args) {
  static_assert(From::kLanes == kFloatLanes && To::kLanes == kFloatLanes, "float32 is between");
  const auto* source = static_cast<const uint8_t*>(args.source);
  auto* target = static_cast<uint8_t*>(args.target);
  const int64_t num_elements = args.num_elements;
  int64_t i = 0;
#pragma GCC unroll 4
  for (; i + kFloatLanes <= num_elements; i += kFloatLanes) {
    To::store(target + i * To::kNbytes, From::load(source + i * From::kNbytes));
  }
  const int64_t rest = num_elements - i;
  if (rest == 0) return;
  alignas(64) uint8_t read[kFloatLanes * From::kNbytes] = {};
  alignas(64) uint8_t written[kFloatLanes * To::kNbytes];
  __builtin_memcpy(read, source + i * From::kNbytes, rest * From::kNbytes);
  To::store(written, From::load(read));
  __builtin_memcpy(target + i * To::kNbytes, written, rest * To::kNbytes);
}

template <class From>
void convert_from(const ConvertArgs& args) {
  switch (args.to) {
    case DType::kFloat16:
      return convert_elements<From, Half>(args);
    case DType::kBFloat16:
      return convert_elements<From, BrainFloat>(args);
    case DType::kFloat32:
      return convert_elements<From, Plain<float>>(args);
    default:
      return convert_elements<From, Double>(args);
  }
}

void convert_any(const ConvertArgs& args) {
  switch (args.from) {
    case DType::kFloat16:
      return convert_from<Half>(args);
    case DType::kBFloat16:
      return convert_from<BrainFloat>(args);
    case DType::kFloat32:
      return convert_from<Plain<float>>(args);
    default:
      return convert_from<Double>(args);
  }
}

}  // namespace
}  // namespace pydist
