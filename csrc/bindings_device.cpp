// The device as Python sees it: which one there is, and how its module hands it over.
#include "base/check.h"
#include "base/device_runtime.h"
#include "bindings.h"

namespace py = pybind11;

namespace pydist {

namespace {

void register_device_runtime(const py::capsule& capsule) {
  PYDIST_CHECK(PyCapsule_IsValid(capsule.ptr(), kDeviceRuntimeCapsule), UsageError,
               "expected a capsule named ", kDeviceRuntimeCapsule,
               ": pydist._cuda and pydist._C are of different builds; reinstall pydist");
  auto* runtime = static_cast<DeviceRuntime*>(capsule.get_pointer());
  PYDIST_CHECK(device_runtime() == nullptr || device_runtime() == runtime, UsageError,
               "this process uses the ", device_runtime()->name(), " device already, so it cannot ",
               "take ", runtime->name());
  set_device_runtime(runtime);
}

py::object device_name() {
  const DeviceRuntime* runtime = device_runtime();
  return runtime == nullptr ? py::object(py::none()) : py::str(runtime->name());
}

}  // namespace

// For the errors of the runtime, which pass from one module to the other.
void allocate_and_free(size_t nbytes) {
  PYDIST_CHECK(device_runtime() != nullptr, UsageError, "this process has no device");
  device_runtime()->deallocate(device_runtime()->allocate(nbytes));
}

void bind_device(py::module_& module) {
  module.def("register_device_runtime", &register_device_runtime, py::arg("capsule"),
             "Takes the device's runtime from its module; for the life of the process.");
  module.def("device_name", &device_name,
             "\"cuda\" once pydist._cuda is imported, \"emulated\" in tests, None without either.");
  py::module_ testing = module.attr("testing");
  testing.def("allocate_on_device", &allocate_and_free, py::arg("nbytes"),
              "Allocates memory of the current device and frees it.");
}

}  // namespace pydist
