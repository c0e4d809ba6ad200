// pydist._cuda: one attribute, the capsule that pydist._C takes its device from.
#include <Python.h>

#include "cuda/cuda_runtime.h"

namespace {

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    "pydist._cuda",
    "CUDA's streams, memory and kernels for pydist._C",
    -1,  // no state of its own, and not for subinterpreters
    nullptr,
    nullptr,
    nullptr,
    nullptr,
    nullptr,
};

}  // namespace

PyMODINIT_FUNC PyInit__cuda() {
  // Never destroyed: streams and events may outlive everything that has an end.
  static auto* const runtime = new pydist::CudaRuntime;
  PyObject* module = PyModule_Create(&definition);
  if (module == nullptr) return nullptr;
  PyObject* capsule = PyCapsule_New(static_cast<pydist::DeviceRuntime*>(runtime),
                                    pydist::kDeviceRuntimeCapsule, nullptr);
  if (capsule == nullptr || PyModule_AddObject(module, "runtime", capsule) < 0) {
    Py_XDECREF(capsule);
    Py_DECREF(module);
    return nullptr;
  }
  return module;
}
