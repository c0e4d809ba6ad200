// An accelerator as the engine sees it: streams, events, memory and kernels.
//
// CUDA's implementation is an extension module of its own (csrc/cuda), so that everything else is
// built, and tested, without it: the tests have another one, whose streams run late on the CPU.
//
// All calls only enqueue work; none waits for the device, but for allocations and where it says so.
// They concern the calling thread's current device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace pydist {

using Stream = void*;  // cudaStream_t
using Event = void*;   // cudaEvent_t

enum class Access : uint8_t { kRead, kWrite };

// What a launch touches.
using VisitAccess = std::function<void(Access access, const void* data, size_t nbytes)>;

// A kernel, described once where its body is. Its arguments are one struct that is passed by value;
// what that points to is memory of the device.
struct Kernel {
  const char* name;
  size_t arguments_nbytes;
  int num_threads;  // of a block
  // The same body, for all blocks, on the CPU: for tests.
  void (*run_on_host)(const void* arguments, int num_blocks);
  void (*visit_accesses)(const void* arguments, const VisitAccess& visit);
};

class DeviceRuntime {
 public:
  virtual ~DeviceRuntime() = default;
  virtual const char* name() const = 0;  // "cuda"

  virtual int current_device() = 0;
  virtual void set_current_device(int device) = 0;
  // Back to what current_device() gave: does not make a device ready that has not been used.
  virtual void restore_device(int device) noexcept = 0;
  virtual int
  num_processors() = 0;  // of the current device: a grid of twice as many blocks is full

  virtual Stream current_stream() = 0;  // torch's, of this thread
  // Does not wait for the default stream; of the highest priority.
  virtual Stream make_stream() = 0;
  virtual void destroy_stream(Stream stream) noexcept = 0;
  virtual bool is_capturing(Stream stream) = 0;
  // From now on this thread may query events and allocate while another one captures a graph.
  virtual void relax_capture_checks() = 0;

  virtual Event make_event() = 0;  // without timing
  virtual void destroy_event(Event event) noexcept = 0;
  virtual void record(Event event, Stream stream) = 0;
  virtual void wait(Stream stream, Event event) = 0;
  // True if what was recorded last is complete, or nothing was. Raises where the device has failed.
  virtual bool is_complete(Event event) = 0;

  virtual void* allocate(size_t nbytes) = 0;
  // No work that uses the memory may be under way. Waits for all that is, on every stream, as
  // free_pinned() does too: neither belongs into a step.
  virtual void deallocate(void* memory) noexcept = 0;
  // Of the host, which the device can copy from and to while the host goes on.
  virtual void* allocate_pinned(size_t nbytes) = 0;
  virtual void free_pinned(void* memory) noexcept = 0;
  // Between the device and pinned memory, or on the device.
  virtual void copy(void* to, const void* from, size_t nbytes, Stream stream) = 0;
  virtual void fill_zero(void* memory, size_t nbytes, Stream stream) = 0;

  virtual void launch(const Kernel& kernel, const void* arguments, int num_blocks,
                      Stream stream) = 0;
};

// What the module that has one calls the capsule in which it hands it over. With another interface
// this is another name, so that modules of different builds refuse each other.
constexpr const char* kDeviceRuntimeCapsule = "pydist.DeviceRuntime.2";

// The one that was registered, or null. Set once, when its module is imported.
DeviceRuntime* device_runtime();
void set_device_runtime(DeviceRuntime* runtime);

}  // namespace pydist
