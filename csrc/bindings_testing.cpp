// Pure cores as Python sees them, for property tests only.
#include <pybind11/stl.h>

#include "base/error.h"
#include "bindings.h"
#include "bucket/layout.h"
#include "bucket/round.h"
#include "bucket/round_stats.h"
#include "collective/convert.h"
#include "transport/block_allocator.h"

namespace py = pybind11;

namespace pydist {

namespace {

using UnitTuple = std::tuple<bool, int64_t, std::vector<std::pair<int, int64_t>>>;

// (alone, number of elements, [(parameter, first element)]) per unit, all of float32.
std::vector<UnitTuple> layout(const std::vector<int64_t>& sizes, const std::vector<int>& order,
                              size_t alone_nbytes, const std::vector<size_t>& caps_nbytes) {
  std::vector<ParameterSpec> parameters;
  for (const int64_t size : sizes) parameters.push_back({size, DType::kFloat32});
  std::vector<UnitTuple> result;
  for (const Unit& unit : make_layout(parameters, order, {alone_nbytes, caps_nbytes})) {
    std::vector<std::pair<int, int64_t>> members;
    for (const Member& member : unit.members) members.emplace_back(member.parameter, member.begin);
    result.emplace_back(unit.alone, unit.num_elements, std::move(members));
  }
  return result;
}

std::vector<int> members_of(int size, const std::vector<int>& first,
                            const std::vector<int>& second) {
  Bitmap bitmap(size);
  Bitmap other(size);
  for (const int i : first) bitmap.set(i);
  for (const int i : second) other.set(i);
  bitmap.merge(other);
  std::vector<int> members;
  for (int i = 0; i < size; ++i) {
    if (bitmap.test(i)) members.push_back(i);
  }
  return members;
}

DType floating_type(const std::string& name) {
  for (int d = 0; d < kNumDTypes; ++d) {
    if (is_convertible(static_cast<DType>(d)) && name == dtype_name(static_cast<DType>(d))) {
      return static_cast<DType>(d);
    }
  }
  throw UsageError(name + " is not a floating type");
}

// Memory is given by address: this file knows no tensors.
void convert_memory(const std::string& from, uintptr_t source, const std::string& to,
                    uintptr_t target, int64_t num_elements, int isa) {
  convert(floating_type(from), reinterpret_cast<const void*>(source), floating_type(to),
          reinterpret_cast<void*>(target), num_elements, static_cast<Isa>(isa));
}

py::dict stats_times(const RoundStats& stats) {
  py::dict result;
  result["forward"] = stats.times().forward_ns;
  result["backward"] = stats.times().backward_ns;
  result["waiting"] = stats.times().waiting_ns;
  result["reducing"] = stats.times().reducing_ns;
  result["total"] = stats.times().total_ns;
  return result;
}

std::vector<std::pair<uint64_t, int64_t>> stats_late(const RoundStats& stats) {
  std::vector<std::pair<uint64_t, int64_t>> result;
  for (const Lateness& late : stats.late()) result.emplace_back(late.num_last, late.waited_ns);
  return result;
}

}  // namespace

void bind_testing(py::module_& module) {
  py::module_ testing = module.def_submodule("testing", "Pure cores, for property tests.");
  py::class_<BlockAllocator>(testing, "BlockAllocator", "Offsets of blocks in a range; see C++.")
      .def(py::init<size_t, size_t>(), py::arg("begin"), py::arg("end"))
      .def("allocate", &BlockAllocator::allocate, py::arg("nbytes"), "An offset, or None.")
      .def("deallocate", &BlockAllocator::deallocate, py::arg("offset"), "Gives a block back.")
      .def("pin", &BlockAllocator::pin, py::arg("offset"), "Keeps a block from being reused.")
      .def("unpin", &BlockAllocator::unpin, py::arg("offset"), "Undoes one pin.")
      .def("is_block", &BlockAllocator::is_block, py::arg("offset"), "Handed out or pinned.")
      .def_property_readonly("used_nbytes", &BlockAllocator::used_nbytes, "In live blocks.")
      .def_property_readonly("high_water", &BlockAllocator::high_water, "Highest end so far.");
  py::class_<RoundStats>(testing, "RoundStats", "Where time goes, with a clock in ns; see C++.")
      .def(py::init<int>(), py::arg("size"))
      .def("begin_forward", &RoundStats::begin_forward, py::arg("now_ns"), "A forward begins.")
      .def("end_forward", &RoundStats::end_forward, py::arg("now_ns"), "It ends.")
      .def("discount", &RoundStats::discount, py::arg("waited_ns"), "Waited for others elsewhere.")
      .def("open", &RoundStats::open, py::arg("now_ns"), "A backward begins.")
      .def("close", &RoundStats::close, py::arg("now_ns"), "All gradients are there.")
      .def("busy_ns", &RoundStats::busy_ns, py::arg("now_ns"), "What this rank tells the others.")
      .def("meet", &RoundStats::meet, py::arg("now_ns"), py::arg("rank"), py::arg("busy_ns"),
           "All ranks have met.")
      .def("finish", &RoundStats::finish, py::arg("now_ns"), "All means are there.")
      .def("times", &stats_times, "Sums of ns, by name.")
      .def("late", &stats_late, "(rounds in which it came last, ns waited for it) by rank.");
  testing.def("layout", &layout, py::arg("sizes"), py::arg("order"), py::arg("alone_nbytes"),
              py::arg("caps_nbytes"), "Units of float32 parameters.");
  testing.def("convert", &convert_memory, py::arg("from_dtype"), py::arg("source"),
              py::arg("to_dtype"), py::arg("target"), py::arg("num_elements"), py::arg("isa"),
              "Converts floats at one address to floats of another type at another.");
  testing.def(
      "best_isa", [] { return static_cast<int>(detect_isa()); },
      "The largest `isa` that convert() takes here.");
  testing.def("bitmap_union", &members_of, py::arg("size"), py::arg("first"), py::arg("second"),
              "Members of the union of two bitmaps.");
}

}  // namespace pydist
