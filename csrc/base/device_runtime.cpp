#include "base/device_runtime.h"

#include <atomic>

namespace pydist {

namespace {

std::atomic<DeviceRuntime*> registered{nullptr};

}  // namespace

DeviceRuntime* device_runtime() { return registered.load(std::memory_order_acquire); }

void set_device_runtime(DeviceRuntime* runtime) {
  registered.store(runtime, std::memory_order_release);
}

}  // namespace pydist
