// Descriptors of the kernels that add segments, their bodies on the host, and how they are
// launched.
#include "collective/device_kernels/reduce_segments.h"

#include <array>
#include <utility>

#include "base/check.h"
#include "collective/device_kernels/grid.h"
#include "collective/device_kernels/kernel_names.h"
#include "collective/device_kernels/reduce_segments.cuh"
#include "collective/float_control.h"

namespace pydist {

namespace {

constexpr int kNumPairs = kNumElements * kNumElements;

constexpr int64_t kElementNbytes[kNumElements] = {2, 2, 4, 8, 1};
constexpr const char* kElementNames[kNumElements] = {"float16", "bfloat16", "float32", "float64",
                                                     "float8"};

const void* input_of(const ReduceSegmentsArguments& arguments, int k) {
  return k == arguments.own
             ? arguments.own_input
             : static_cast<const char*>(arguments.inputs) + k * arguments.stride_nbytes;
}

template <class From, class To>
void run_on_host(const void* given, int num_blocks) {
  const DefaultFloatControl float_control;
  reduce_on_host<From, To>(*static_cast<const ReduceSegmentsArguments*>(given), num_blocks);
}

template <int kFrom, int kTo>
void visit_accesses(const void* given, const VisitAccess& visit) {
  const auto& arguments = *static_cast<const ReduceSegmentsArguments*>(given);
  const auto nbytes = [&arguments](int element) {
    return static_cast<size_t>(
        element_nbytes(static_cast<Element>(element), arguments.num_elements));
  };
  for (int k = 0; k < arguments.num_inputs; ++k) {
    visit(Access::kRead, input_of(arguments, k), nbytes(kFrom));
  }
  visit(Access::kWrite, arguments.output, nbytes(kTo));
}

template <int kFrom, int kTo>
Kernel describe() {
  return {kReduceSegmentsNames[kFrom * kNumElements + kTo], sizeof(ReduceSegmentsArguments),
          kKernelThreads, &run_on_host<ElementAt<kFrom>, ElementAt<kTo>>,
          &visit_accesses<kFrom, kTo>};
}

template <int... kPair>
std::array<Kernel, kNumPairs> describe_all(std::integer_sequence<int, kPair...>) {
  return {describe<kPair / kNumElements, kPair % kNumElements>()...};
}

// float8 is read and written by 16 bytes, everything else at least by its elements.
int alignment_of(Element element) {
  return element == Element::kFloat8 ? kVectorNbytes : static_cast<int>(element_nbytes(element, 1));
}

bool are_aligned(Element from, Element to, const ReduceSegmentsArguments& arguments) {
  const int inputs = alignment_of(from);
  return is_aligned(arguments.inputs, inputs) && arguments.stride_nbytes % inputs == 0 &&
         (arguments.own < 0 || is_aligned(arguments.own_input, inputs)) &&
         is_aligned(arguments.output, alignment_of(to));
}

}  // namespace

const char* element_name(Element element) { return kElementNames[static_cast<int>(element)]; }

Element element_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return Element::kFloat16;
    case DType::kBFloat16:
      return Element::kBFloat16;
    case DType::kFloat32:
      return Element::kFloat32;
    case DType::kFloat64:
      return Element::kFloat64;
    default:
      throw UsageError(concat(dtype_name(dtype), " is not a real floating type"));
  }
}

int64_t element_nbytes(Element element, int64_t num_elements) {
  return element == Element::kFloat8 ? float8_nbytes(num_elements)
                                     : num_elements * kElementNbytes[static_cast<int>(element)];
}

const Kernel& reduce_segments_kernel(Element from, Element to) {
  static const std::array<Kernel, kNumPairs> kernels =
      describe_all(std::make_integer_sequence<int, kNumPairs>());
  return kernels[static_cast<int>(from) * kNumElements + static_cast<int>(to)];
}

void reduce_segments(Element from, Element to, const ReduceSegmentsArguments& arguments,
                     Stream stream) {
  if (arguments.num_elements == 0) return;
  PYDIST_CHECK(arguments.num_inputs >= 1, UsageError, "the sum of ", arguments.num_inputs,
               " segments");
  PYDIST_CHECK(are_aligned(from, to, arguments), UsageError, "segments of ", element_name(from),
               " and their sum in ", element_name(to), " must be aligned to ", alignment_of(from),
               " and ", alignment_of(to), " bytes; found ", arguments.inputs, " with stride ",
               arguments.stride_nbytes, ", own ", arguments.own_input, " and ", arguments.output);
  // As many threads as there are accesses of 16 bytes in the narrower buffer.
  const int64_t narrower =
      std::min(kElementNbytes[static_cast<int>(from)], kElementNbytes[static_cast<int>(to)]);
  const int64_t num_threads = divided_up(arguments.num_elements * narrower, kVectorNbytes);
  device_runtime()->launch(reduce_segments_kernel(from, to), &arguments,
                           num_blocks_for(num_threads, kKernelThreads), stream);
}

}  // namespace pydist
