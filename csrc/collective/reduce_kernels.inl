// The reduction kernels, compiled once per instruction set.
//
// The including file sets the compiler's target, then defines in this anonymous namespace
// kVectorNbytes, widen_half() and narrow_half(). Everything here has internal linkage, and nothing
// of the standard library is called: a function shared between object files could otherwise be the
// copy that was compiled for a processor which is not this one.
//
// One vector step, for each of kUnroll vectors:
//
//   inputs[0] --load--> accumulator --combine inputs[1], inputs[2] ...--> scale --store-->
//   outputs[0], outputs[1] ...
//
// so every input is read once and every output written once, whatever their number. All loads of a
// step precede its stores, so outputs may be inputs. The last elements run through the same code in
// a vector that is partly filled.

namespace pydist {
namespace {

template <class T>
struct VectorOf {
  typedef T type __attribute__((vector_size(kVectorNbytes)));
};
constexpr int kFloatLanes = kVectorNbytes / static_cast<int>(sizeof(float));
typedef uint16_t Word16Vector __attribute__((vector_size(kVectorNbytes / 2)));
using Word32Vector = VectorOf<uint32_t>::type;
using FloatVector = VectorOf<float>::type;

// ---- Elements: how a type is loaded into its accumulator and stored from it.

template <class T>
struct Plain {
  using Accumulator = T;
  using Vector = typename VectorOf<T>::type;
  static constexpr int kNbytes = sizeof(T);
  static constexpr int kLanes = kVectorNbytes / kNbytes;
  static inline Vector load(const void* from) {
    Vector vector;
    __builtin_memcpy(&vector, from, sizeof(vector));
    return vector;
  }
  static inline void store(void* to, Vector vector) {
    __builtin_memcpy(to, &vector, sizeof(vector));
  }
};

inline Word16Vector load_words(const void* from) {
  Word16Vector words;
  __builtin_memcpy(&words, from, sizeof(words));
  return words;
}

struct Half {
  using Accumulator = float;
  using Vector = FloatVector;
  static constexpr int kNbytes = 2;
  static constexpr int kLanes = kFloatLanes;
  static inline Vector load(const void* from) { return widen_half(load_words(from)); }
  static inline void store(void* to, Vector vector) {
    const Word16Vector words = narrow_half(vector);
    __builtin_memcpy(to, &words, sizeof(words));
  }
};

struct BrainFloat {
  using Accumulator = float;
  using Vector = FloatVector;
  static constexpr int kNbytes = 2;
  static constexpr int kLanes = kFloatLanes;
  static inline Vector load(const void* from) {
    return (Vector)(__builtin_convertvector(load_words(from), Word32Vector) << 16);
  }
  static inline void store(void* to, Vector vector) {
    const Word32Vector bits = (Word32Vector)vector;
    // To nearest, ties to even; a carry out of the mantissa is right, it reaches the exponent and
    // at the end infinity.
    const Word32Vector rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const Word32Vector quiet_nan = (bits >> 16) | 0x40u;
    const Word32Vector result = vector != vector ? quiet_nan : rounded;
    const Word16Vector words = __builtin_convertvector(result, Word16Vector);
    __builtin_memcpy(to, &words, sizeof(words));
  }
};

// ---- Operations on accumulators.

struct Sum {
  static constexpr bool kScaled = false;
  template <class Vector>
  static inline Vector combine(Vector a, Vector b) {
    return a + b;
  }
};
struct Mean : Sum {
  static constexpr bool kScaled = true;
};
struct Product {
  static constexpr bool kScaled = false;
  template <class Vector>
  static inline Vector combine(Vector a, Vector b) {
    return a * b;
  }
};
// A NaN on the left loses every comparison and stays; one on the right is taken explicitly.
struct Min {
  static constexpr bool kScaled = false;
  template <class Vector>
  static inline Vector combine(Vector a, Vector b) {
    return (b < a) | (b != b) ? b : a;
  }
};
struct Max {
  static constexpr bool kScaled = false;
  template <class Vector>
  static inline Vector combine(Vector a, Vector b) {
    return (b > a) | (b != b) ? b : a;
  }
};
struct Or {
  static constexpr bool kScaled = false;
  template <class Vector>
  static inline Vector combine(Vector a, Vector b) {
    return a | b;
  }
};
struct And {
  static constexpr bool kScaled = false;
  template <class Vector>
  static inline Vector combine(Vector a, Vector b) {
    return a & b;
  }
};
struct Xor {
  static constexpr bool kScaled = false;
  template <class Vector>
  static inline Vector combine(Vector a, Vector b) {
    return a ^ b;
  }
};

// ---- The loop.

inline const uint8_t* input(const ReduceArgs& args, int k) {
  return static_cast<const uint8_t*>(args.inputs[k]);
}
inline uint8_t* output(const ReduceArgs& args, int k) {
  return static_cast<uint8_t*>(args.outputs[k]);
}

template <class Element, class Op>
inline typename Element::Vector scaled(typename Element::Vector vector,
                                       typename Element::Accumulator scale) {
  if constexpr (Op::kScaled) return vector * scale;
  (void)scale;
  return vector;
}

// Where the buffers lie. A fixed number of them is copied into this frame, so that the loop keeps
// the addresses in registers: through `args` it would load them again after every store, which
// might have changed them.
template <int kCount>
struct Addresses {
  explicit Addresses(const ReduceArgs& args) {
    for (int k = 0; k < kCount; ++k) {
      inputs[k] = input(args, k);
      outputs[k] = output(args, k);
    }
  }
  constexpr int num_inputs() const { return kCount; }
  constexpr int num_outputs() const { return kCount; }
  const uint8_t* from(int k) const { return inputs[k]; }
  uint8_t* to(int k) const { return outputs[k]; }

  const uint8_t* inputs[kCount];
  uint8_t* outputs[kCount];
};

// Any number of either.
template <>
struct Addresses<0> {
  explicit Addresses(const ReduceArgs& given) : args(given) {}
  int num_inputs() const { return args.num_inputs; }
  int num_outputs() const { return args.num_outputs; }
  const uint8_t* from(int k) const { return input(args, k); }
  uint8_t* to(int k) const { return output(args, k); }

  const ReduceArgs& args;
};

// kUnroll vectors from byte `at` on.
template <class Element, class Op, int kUnroll, int kCount>
inline __attribute__((always_inline)) void reduce_step(const Addresses<kCount>& addresses,
                                                       int64_t at,
                                                       typename Element::Accumulator scale) {
  constexpr int kStride = Element::kLanes * Element::kNbytes;
  typename Element::Vector sums[kUnroll];
#pragma GCC unroll 8
  for (int u = 0; u < kUnroll; ++u) sums[u] = Element::load(addresses.from(0) + at + u * kStride);
  for (int k = 1; k < addresses.num_inputs(); ++k) {
    const uint8_t* from = addresses.from(k) + at;
#pragma GCC unroll 8
    for (int u = 0; u < kUnroll; ++u) {
      sums[u] = Op::combine(sums[u], Element::load(from + u * kStride));
    }
  }
#pragma GCC unroll 8
  for (int u = 0; u < kUnroll; ++u) sums[u] = scaled<Element, Op>(sums[u], scale);
  for (int k = 0; k < addresses.num_outputs(); ++k) {
    uint8_t* to = addresses.to(k) + at;
#pragma GCC unroll 8
    for (int u = 0; u < kUnroll; ++u) Element::store(to + u * kStride, sums[u]);
  }
}

// The last `nbytes`, fewer than a vector, from byte `at` on.
template <class Element, class Op>
void reduce_rest(const ReduceArgs& args, int64_t at, int nbytes,
                 typename Element::Accumulator scale) {
  alignas(64) uint8_t partial[Element::kLanes * Element::kNbytes] = {};
  __builtin_memcpy(partial, input(args, 0) + at, nbytes);
  typename Element::Vector sum = Element::load(partial);
  for (int k = 1; k < args.num_inputs; ++k) {
    __builtin_memcpy(partial, input(args, k) + at, nbytes);
    sum = Op::combine(sum, Element::load(partial));
  }
  Element::store(partial, scaled<Element, Op>(sum, scale));
  for (int k = 0; k < args.num_outputs; ++k) {
    __builtin_memcpy(output(args, k) + at, partial, nbytes);
  }
}

template <class Element, class Op, int kCount>
__attribute__((noinline)) void reduce_buffers(const ReduceArgs& args) {
  constexpr int kUnroll = 4;
  constexpr int64_t kStride = Element::kLanes * Element::kNbytes;
  using Accumulator = typename Element::Accumulator;
  const Addresses<kCount> addresses(args);
  const int divisor = args.divisor > 0 ? args.divisor : args.num_inputs;
  const Accumulator scale = Op::kScaled ? Accumulator(1) / Accumulator(divisor) : Accumulator(1);
  const int64_t nbytes = args.num_elements * Element::kNbytes;
  int64_t at = 0;
  for (; at + kUnroll * kStride <= nbytes; at += kUnroll * kStride) {
    reduce_step<Element, Op, kUnroll>(addresses, at, scale);
  }
  for (; at + kStride <= nbytes; at += kStride) {
    reduce_step<Element, Op, 1>(addresses, at, scale);
  }
  if (at < nbytes) reduce_rest<Element, Op>(args, at, static_cast<int>(nbytes - at), scale);
}

// The usual case, every rank's copy in and out, has loops of its own for few ranks.
template <class Element, class Op>
void reduce_all(const ReduceArgs& args) {
  if (args.num_inputs == 2 && args.num_outputs == 2) {
    reduce_buffers<Element, Op, 2>(args);
  } else if (args.num_inputs == 4 && args.num_outputs == 4) {
    reduce_buffers<Element, Op, 4>(args);
  } else {
    reduce_buffers<Element, Op, 0>(args);
  }
}

// Keeps the compiler from contracting a product and a sum into one instruction that rounds once,
// which only some processors have.
template <class T>
inline T rounded(T value) {
  asm("" : "+m"(value));
  return value;
}

template <class T>
void multiply_complex(const ReduceArgs& args) {
  for (int64_t i = 0; i < args.num_elements; ++i) {
    T total[2];
    __builtin_memcpy(total, input(args, 0) + i * sizeof(total), sizeof(total));
    for (int k = 1; k < args.num_inputs; ++k) {
      T factor[2];
      __builtin_memcpy(factor, input(args, k) + i * sizeof(factor), sizeof(factor));
      const T real = rounded(total[0] * factor[0]) - rounded(total[1] * factor[1]);
      const T imaginary = rounded(total[0] * factor[1]) + rounded(total[1] * factor[0]);
      total[0] = real;
      total[1] = imaginary;
    }
    for (int k = 0; k < args.num_outputs; ++k) {
      __builtin_memcpy(output(args, k) + i * sizeof(total), total, sizeof(total));
    }
  }
}

// ---- From run-time types to kernels.

template <class Element>
void reduce_floats(ReduceOp op, const ReduceArgs& args) {
  switch (op) {
    case ReduceOp::kSum:
      return reduce_all<Element, Sum>(args);
    case ReduceOp::kMean:
      return reduce_all<Element, Mean>(args);
    case ReduceOp::kMin:
      return reduce_all<Element, Min>(args);
    case ReduceOp::kMax:
      return reduce_all<Element, Max>(args);
    case ReduceOp::kProduct:
      return reduce_all<Element, Product>(args);
    default:
      return;  // refused by reduce()
  }
}

// Of any integers: of their bytes, whatever type these make.
void reduce_bits(ReduceOp op, const ReduceArgs& args, int element_nbytes) {
  ReduceArgs bytes = args;
  bytes.num_elements *= element_nbytes;
  switch (op) {
    case ReduceOp::kBitAnd:
      return reduce_all<Plain<uint8_t>, And>(bytes);
    case ReduceOp::kBitOr:
      return reduce_all<Plain<uint8_t>, Or>(bytes);
    case ReduceOp::kBitXor:
      return reduce_all<Plain<uint8_t>, Xor>(bytes);
    default:
      return;
  }
}

// Sums and products are taken in the unsigned type, where overflow is defined and has the same
// bits.
template <class Signed, class Unsigned>
void reduce_integers(ReduceOp op, const ReduceArgs& args) {
  switch (op) {
    case ReduceOp::kSum:
      return reduce_all<Plain<Unsigned>, Sum>(args);
    case ReduceOp::kMin:
      return reduce_all<Plain<Signed>, Min>(args);
    case ReduceOp::kMax:
      return reduce_all<Plain<Signed>, Max>(args);
    case ReduceOp::kProduct:
      return reduce_all<Plain<Unsigned>, Product>(args);
    case ReduceOp::kMean:
      return;  // refused by reduce()
    default:
      return reduce_bits(op, args, sizeof(Signed));
  }
}

// Adding complex numbers is adding twice as many real ones.
template <class T>
void reduce_complex(ReduceOp op, const ReduceArgs& args) {
  if (op == ReduceOp::kProduct) return multiply_complex<T>(args);
  ReduceArgs parts = args;
  parts.num_elements *= 2;
  reduce_floats<Plain<T>>(op, parts);
}

void reduce_bools(ReduceOp op, const ReduceArgs& args) {
  if (op >= ReduceOp::kBitAnd) return reduce_bits(op, args, 1);
  if (op == ReduceOp::kSum || op == ReduceOp::kMax) return reduce_all<Plain<uint8_t>, Or>(args);
  return reduce_all<Plain<uint8_t>, And>(args);
}

void reduce_any(DType dtype, ReduceOp op, const ReduceArgs& args) {
  switch (dtype) {
    case DType::kBool:
      return reduce_bools(op, args);
    case DType::kUInt8:
      return reduce_integers<uint8_t, uint8_t>(op, args);
    case DType::kInt8:
      return reduce_integers<int8_t, uint8_t>(op, args);
    case DType::kInt16:
      return reduce_integers<int16_t, uint16_t>(op, args);
    case DType::kInt32:
      return reduce_integers<int32_t, uint32_t>(op, args);
    case DType::kInt64:
      return reduce_integers<int64_t, uint64_t>(op, args);
    case DType::kFloat16:
      return reduce_floats<Half>(op, args);
    case DType::kBFloat16:
      return reduce_floats<BrainFloat>(op, args);
    case DType::kFloat32:
      return reduce_floats<Plain<float>>(op, args);
    case DType::kFloat64:
      return reduce_floats<Plain<double>>(op, args);
    case DType::kComplex64:
      return reduce_complex<float>(op, args);
    case DType::kComplex128:
      return reduce_complex<double>(op, args);
  }
}

}  // namespace
}  // namespace pydist
