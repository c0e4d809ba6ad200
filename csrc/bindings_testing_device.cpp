// Makes the emulated device of the tests this process's device.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <dlfcn.h>

#include <mutex>
#include <string>
#include <unordered_map>

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

// What tensors' memory is known by. The stream is the current one at allocation. What is made while
// that captures a graph is the graph's for good, as in CUDA a private pool's.
struct Block {
  size_t nbytes = 0;
  Stream stream = nullptr;
  bool is_captured = false;
};

// Tells the device of the memory that tensors get and give back, as CUDA's caching allocator would
// know it. A context is its data's pointer, as in the allocator below it: oneDNN allocates raw.
class TellingAllocator final : public c10::Allocator {
 public:
  explicit TellingAllocator(c10::Allocator* base) : base_(base), free_(base->raw_deleter()) {
    PYDIST_CHECK(free_ != nullptr, UsageError, "the CPU's allocator has no raw interface");
    instance_ = this;
  }

  c10::DataPtr allocate(size_t nbytes) override {
    c10::DataPtr memory = base_->allocate(nbytes);
    void* data = memory.get();
    if (data == nullptr) return memory;
    Block block{nbytes};
    tell_allocated(data, nbytes, &block.stream);
    block.is_captured = device_runtime() != nullptr && device_runtime()->is_capturing(block.stream);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      blocks_[data] = block;
    }
    const c10::Device device = memory.device();
    return {data, memory.release_context(), &TellingAllocator::deallocate, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &TellingAllocator::deallocate; }
  void copy_data(void* target, const void* source, std::size_t nbytes) const override {
    default_copy_data(target, source, nbytes);
  }

 private:
  static void deallocate(void* data) {
    if (data == nullptr) return;
    if (instance_->forget(data)) instance_->free_(data);
  }

  // False where the memory stays a graph's.
  bool forget(void* data) {
    Block block;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const auto found = blocks_.find(data);
      if (found == blocks_.end()) return true;  // older than the device
      block = found->second;
      blocks_.erase(found);
    }
    if (!block.is_captured || device_runtime()->is_capturing(block.stream)) {
      tell_freed(data, block.nbytes, block.stream);
    }
    return !block.is_captured;
  }

  static TellingAllocator* instance_;
  c10::Allocator* base_;
  c10::DeleterFnPtr free_;
  std::mutex mutex_;
  std::unordered_map<void*, Block> blocks_;
};
TellingAllocator* TellingAllocator::instance_ = nullptr;

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
