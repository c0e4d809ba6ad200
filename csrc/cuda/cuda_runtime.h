// The device as CUDA has it.
#pragma once

#include <mutex>
#include <unordered_map>

#include "base/device_runtime.h"

namespace pydist {

// Errors of the driver are ResourceError where memory is lacking, else Error, with CUDA's words.
class CudaRuntime : public DeviceRuntime {
 public:
  const char* name() const override { return "cuda"; }

  int current_device() override;
  void set_current_device(int device) override;
  void restore_device(int device) noexcept override;
  int num_processors() override;

  Stream current_stream() override;
  Stream make_stream() override;
  void destroy_stream(Stream stream) noexcept override;
  bool is_capturing(Stream stream) override;
  void relax_capture_checks() override;

  Event make_event() override;
  void destroy_event(Event event) noexcept override;
  void record(Event event, Stream stream) override;
  void wait(Stream stream, Event event) override;
  bool is_complete(Event event) override;

  void* allocate(size_t nbytes) override;
  void deallocate(void* memory) noexcept override;
  void* allocate_pinned(size_t nbytes) override;
  void free_pinned(void* memory) noexcept override;
  void copy(void* to, const void* from, size_t nbytes, Stream stream) override;
  void fill_zero(void* memory, size_t nbytes, Stream stream) override;

  void launch(const Kernel& kernel, const void* arguments, int num_blocks, Stream stream) override;

 private:
  const void* function_of(const Kernel& kernel);

  std::mutex mutex_;
  std::unordered_map<const Kernel*, const void*> functions_;
};

}  // namespace pydist
