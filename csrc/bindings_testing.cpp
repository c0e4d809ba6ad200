// Pure cores as Python sees them, for property tests only.
#include <pybind11/stl.h>

#include "bindings.h"
#include "bucket/layout.h"
#include "bucket/round.h"
#include "transport/block_allocator.h"

namespace py = pybind11;

namespace pydist {

namespace {

using UnitTuple = std::tuple<bool, int64_t, std::vector<std::pair<int, int64_t>>>;

// (alone, number of elements, [(parameter, first element)]) per unit, all of float32.
std::vector<UnitTuple> layout(const std::vector<int64_t>& sizes, const std::vector<int>& order,
                              size_t alone_nbytes, size_t first_cap_nbytes, size_t cap_nbytes) {
  std::vector<ParameterSpec> parameters;
  for (const int64_t size : sizes) parameters.push_back({size, DType::kFloat32, 0});
  std::vector<UnitTuple> result;
  for (const Unit& unit :
       make_layout(parameters, order, {alone_nbytes, cap_nbytes, first_cap_nbytes})) {
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
  testing.def("layout", &layout, py::arg("sizes"), py::arg("order"), py::arg("alone_nbytes"),
              py::arg("first_cap_nbytes"), py::arg("cap_nbytes"), "Units of float32 parameters.");
  testing.def("bitmap_union", &members_of, py::arg("size"), py::arg("first"), py::arg("second"),
              "Members of the union of two bitmaps.");
}

}  // namespace pydist
