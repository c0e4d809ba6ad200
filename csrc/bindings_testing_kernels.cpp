// The device's kernels, run on the host, as Python sees them, for tests only. Memory is given by
// address: this file knows no tensors.
#include <pybind11/stl.h>

#include <algorithm>
#include <tuple>

#include "base/error.h"
#include "bindings.h"
#include "bucket/copy_tiles.h"
#include "collective/device_kernels/reduce_segments.h"
#include "collective/reduce.h"

namespace py = pybind11;

namespace pydist {

namespace {

DType dtype_of(const std::string& name) {
  for (int d = 0; d < kNumDTypes; ++d) {
    if (name == dtype_name(static_cast<DType>(d))) return static_cast<DType>(d);
  }
  throw UsageError(concat("no type is called ", name));
}

Element element_called(const std::string& name) {
  for (int e = 0; e < kNumElements; ++e) {
    if (name == element_name(static_cast<Element>(e))) return static_cast<Element>(e);
  }
  throw UsageError(concat("no element is called ", name));
}

// source (0: zeros), its dtype, target, its dtype, number of elements
using ItemTuple = std::tuple<uintptr_t, std::string, uintptr_t, std::string, int64_t>;

std::vector<PackItem> items_of(const std::vector<ItemTuple>& tuples) {
  std::vector<PackItem> items;
  for (const auto& [source, from, target, to, num_elements] : tuples) {
    items.push_back({reinterpret_cast<const void*>(source), dtype_of(from),
                     reinterpret_cast<void*>(target), dtype_of(to), num_elements});
  }
  return items;
}

// Returns the number of tiles.
int64_t copy_many(const std::vector<ItemTuple>& tuples, double scale, bool inspects,
                  uintptr_t found_nonfinite, uintptr_t partials, int num_partials, int num_blocks) {
  const std::vector<PackItem> items = items_of(tuples);
  const int64_t tile_nbytes = tile_nbytes_for(items, num_blocks);
  std::vector<CopyTile> tiles(static_cast<size_t>(count_tiles(items, tile_nbytes)));
  write_tiles(items, tile_nbytes, tiles.data());
  CopyManyArguments arguments;
  arguments.tiles = tiles.data();
  arguments.num_tiles = static_cast<int32_t>(tiles.size());
  arguments.scale = scale;
  arguments.found_nonfinite = reinterpret_cast<float*>(found_nonfinite);
  arguments.partials = reinterpret_cast<float*>(partials);
  arguments.num_partials = num_partials;
  (inspects ? kCopyManyInspect : kCopyMany).run_on_host(&arguments, num_blocks);
  return arguments.num_tiles;
}

void reduce_segments_of(const std::string& from, const std::string& to, uintptr_t inputs,
                        int64_t stride_nbytes, int num_inputs, int own, uintptr_t own_input,
                        uintptr_t output, int64_t num_elements, double scale, int num_blocks) {
  ReduceSegmentsArguments arguments;
  arguments.inputs = reinterpret_cast<const void*>(inputs);
  arguments.stride_nbytes = stride_nbytes;
  arguments.num_inputs = num_inputs;
  arguments.own = own;
  arguments.own_input = reinterpret_cast<const void*>(own_input);
  arguments.output = reinterpret_cast<void*>(output);
  arguments.num_elements = num_elements;
  arguments.scale = scale;
  reduce_segments_kernel(element_called(from), element_called(to))
      .run_on_host(&arguments, num_blocks);
}

void sum_partials(uintptr_t partials, int64_t num_partials, uintptr_t sum) {
  SumPartialsArguments arguments;
  arguments.partials = reinterpret_cast<const float*>(partials);
  arguments.num_partials = num_partials;
  arguments.sum = reinterpret_cast<float*>(sum);
  kSumPartials.run_on_host(&arguments, 1);
}

// What the ranks of a host compute, for comparison.
void reduce_mean(const std::string& dtype, const std::vector<uintptr_t>& inputs, uintptr_t output,
                 int64_t num_elements) {
  std::vector<const void*> pointers;
  for (const uintptr_t input : inputs) pointers.push_back(reinterpret_cast<const void*>(input));
  void* const to = reinterpret_cast<void*>(output);
  ReduceArgs args{pointers.data(), static_cast<int>(pointers.size()), &to, 1, num_elements};
  reduce(dtype_of(dtype), ReduceOp::kMean, args, detect_isa());
}

}  // namespace

void bind_testing_kernels(py::module_& testing) {
  testing.def("copy_many", &copy_many, py::arg("items"), py::arg("scale") = 1.0,
              py::arg("inspects") = false, py::arg("found_nonfinite") = 0, py::arg("partials") = 0,
              py::arg("num_partials") = 0, py::arg("num_blocks") = 2,
              "Runs the kernel on the host; see csrc/bucket/device_pack.h. The number of tiles.");
  testing.def("reduce_segments", &reduce_segments_of, py::arg("from_element"),
              py::arg("to_element"), py::arg("inputs"), py::arg("stride_nbytes"),
              py::arg("num_inputs"), py::arg("own"), py::arg("own_input"), py::arg("output"),
              py::arg("num_elements"), py::arg("scale") = 1.0, py::arg("num_blocks") = 2,
              "Runs the kernel on the host; see csrc/collective/device_kernels/.");
  testing.def("sum_partials", &sum_partials, py::arg("partials"), py::arg("num_partials"),
              py::arg("sum"), "Runs the kernel on the host.");
  testing.def("reduce_mean", &reduce_mean, py::arg("dtype"), py::arg("inputs"), py::arg("output"),
              py::arg("num_elements"), "By the host's reduce(), into one output.");
  testing.def("float8_nbytes", &float8_nbytes, py::arg("num_elements"),
              "Of a buffer of float8 with its scales.");
  testing.def("float8_scales_offset", &float8_scales_offset, py::arg("num_elements"),
              "Where its scales are.");
}

}  // namespace pydist
