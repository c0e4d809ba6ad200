// Makes the emulated device of the tests this process's device.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <dlfcn.h>

#include <memory>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/device_runtime.h"
#include "bindings.h"
#include "transport/nccl_api.h"

namespace py = pybind11;

namespace pydist {

namespace {

using Allocated = void (*)(void* data, size_t nbytes, Stream* stream);
using Freed = void (*)(void* data, size_t nbytes, Stream stream);
Allocated tell_allocated = nullptr;
Freed tell_freed = nullptr;

// A tensor's memory, which is the device's there. The stream is the current one at allocation. What
// is made while that captures a graph is the graph's for good, as in CUDA a private pool's.
struct Block {
  c10::DataPtr data;
  size_t nbytes;
  Stream stream = nullptr;
  bool is_captured = false;

  Block(c10::DataPtr memory, size_t size) : data(std::move(memory)), nbytes(size) {}
  ~Block() {
    if (data.get() == nullptr) return;
    if (!is_captured || device_runtime()->is_capturing(stream)) {
      tell_freed(data.get(), nbytes, stream);
    }
    if (is_captured) (void)data.release_context();
  }
};

// Tells the device of the memory that tensors get and give back, as CUDA's caching allocator would
// know it.
class TellingAllocator final : public c10::Allocator {
 public:
  explicit TellingAllocator(c10::Allocator* base) : base_(base) {}

  c10::DataPtr allocate(size_t nbytes) override {
    auto block = std::make_unique<Block>(base_->allocate(nbytes), nbytes);
    void* data = block->data.get();
    if (data != nullptr) {
      tell_allocated(data, nbytes, &block->stream);
      block->is_captured =
          device_runtime() != nullptr && device_runtime()->is_capturing(block->stream);
    }
    const c10::Device device = block->data.device();
    return {data, block.release(), [](void* b) { delete static_cast<Block*>(b); }, device};
  }
  void copy_data(void* target, const void* source, std::size_t nbytes) const override {
    default_copy_data(target, source, nbytes);
  }

 private:
  c10::Allocator* base_;
};

template <class Function>
Function find(void* library, const char* name) {
  void* function = ::dlsym(library, name);
  PYDIST_CHECK(function != nullptr, UsageError, name, " is not in the emulated device's library");
  return reinterpret_cast<Function>(function);
}

void load_device(const std::string& path) {
  PYDIST_CHECK(device_runtime() == nullptr, UsageError,
               "this process has a device already: ", device_runtime()->name());
  void* library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);
  PYDIST_CHECK(library != nullptr, UsageError, ::dlerror());
  tell_allocated = find<Allocated>(library, "pydist_emulated_allocated");
  tell_freed = find<Freed>(library, "pydist_emulated_freed");
  // Leaked: storages keep pointers to it.
  c10::SetCPUAllocator(new TellingAllocator(c10::GetCPUAllocator()), 0);
  nccl::use_library(path);
  set_device_runtime(find<DeviceRuntime* (*)()>(library, "pydist_emulated_device")());
}

}  // namespace

void bind_testing_device(py::module_& testing) {
  testing.def("load_device", &load_device, py::arg("path"),
              "Makes the device of tests/emulation's library this process's, for its life: tensors "
              "of the CPU are the device's.");
}

}  // namespace pydist
