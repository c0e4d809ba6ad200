// Recognises what torch.utils.checkpoint (use_reentrant=False) saved instead of tensors.
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_cpp_function.h>

#include <string>
#include <unordered_map>
#include <vector>

#include "bindings.h"
#include "pipeline/backward_cut.h"

namespace py = pybind11;

namespace pydist {

namespace {

constexpr const char* kRawSaved = "_raw_saved_";  // attributes of a node: what it saved, packed

// By the node's Python type, of which each kind of node has one that is never freed.
const std::vector<std::string>& saved_attributes(const py::object& node) {
  static auto* by_type = new std::unordered_map<PyObject*, std::vector<std::string>>();
  PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(node.ptr()));
  const auto [found, is_new] = by_type->try_emplace(type);
  if (is_new) {
    Py_INCREF(type);
    for (const py::handle attribute :
         py::module_::import("builtins").attr("dir")(py::handle(type))) {
      const auto name = attribute.cast<std::string>();
      if (name.rfind(kRawSaved, 0) == 0) found->second.push_back(name);
    }
  }
  return found->second;
}

// A hook that unpacks what was saved, made by torch.utils.checkpoint.
bool is_checkpoint(py::handle saved) {
  const py::object hook = py::getattr(saved, "unpack_hook", py::none());
  if (hook.is_none()) return false;
  return py::str(py::getattr(hook, "__module__", py::none()))
      .equal(py::str("torch.utils.checkpoint"));
}

bool is_recomputed(const NodePtr& node) {
  const py::gil_scoped_acquire gil;
  const auto object = py::reinterpret_steal<py::object>(torch::autograd::functionToPyObject(node));
  for (const std::string& name : saved_attributes(object)) {
    const py::object saved = py::getattr(object, name.c_str(), py::none());
    if (py::isinstance<py::tuple>(saved)) {
      for (const py::handle one : saved) {
        if (is_checkpoint(one)) return true;
      }
    } else if (is_checkpoint(saved)) {
      return true;
    }
  }
  return false;
}

}  // namespace

void install_recompute_check() { set_recompute_check(&is_recomputed); }

}  // namespace pydist
