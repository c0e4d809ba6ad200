#include "cuda/cuda_runtime.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include "base/check.h"
#include "cuda/kernels.h"

namespace pydist {

namespace {

// CUDA keeps the error of a call for whoever asks next: that must not be torch.
cudaError_t taken(cudaError_t status) {
  if (status != cudaSuccess) (void)cudaGetLastError();
  return status;
}

template <class ErrorType = Error, class... Args>
void check(cudaError_t status, const Args&... call) {
  PYDIST_CHECK(taken(status) == cudaSuccess, ErrorType, call...,
               " failed: ", cudaGetErrorString(status), " (", cudaGetErrorName(status), ")");
}

cudaStream_t stream_of(Stream stream) { return static_cast<cudaStream_t>(stream); }
cudaEvent_t event_of(Event event) { return static_cast<cudaEvent_t>(event); }

// Within the scope CUDA lets this thread make calls that it refuses while a graph is captured, as
// they might wait for the device; ours never concern anything that is captured.
class RelaxedCapture {
 public:
  RelaxedCapture() { (void)cudaThreadExchangeStreamCaptureMode(&other_mode_); }
  ~RelaxedCapture() { (void)cudaThreadExchangeStreamCaptureMode(&other_mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode other_mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace

int CudaRuntime::current_device() { return c10::cuda::current_device(); }

void CudaRuntime::set_current_device(int device) {
  c10::cuda::set_device(static_cast<c10::DeviceIndex>(device));
}

// Without a context on the device, torch only remembers it.
void CudaRuntime::restore_device(int device) noexcept {
  try {
    (void)taken(c10::cuda::MaybeSetDevice(static_cast<c10::DeviceIndex>(device)));
  } catch (...) {  // the device has failed; whoever uses it next learns that
  }
}

int CudaRuntime::num_processors() {
  int count = 0;
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, current_device()),
        "cudaDeviceGetAttribute");
  return count;
}

Stream CudaRuntime::current_stream() { return c10::cuda::getCurrentCUDAStream().stream(); }

Stream CudaRuntime::make_stream() {
  const RelaxedCapture relaxed;
  int lowest = 0;
  int highest = 0;
  check(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "cudaDeviceGetStreamPriorityRange");
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, highest),
        "cudaStreamCreateWithPriority");
  return stream;
}

void CudaRuntime::destroy_stream(Stream stream) noexcept {
  (void)taken(cudaStreamDestroy(stream_of(stream)));
}

bool CudaRuntime::is_capturing(Stream stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream_of(stream), &status), "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

void CudaRuntime::relax_capture_checks() {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  check(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
}

Event CudaRuntime::make_event() {
  cudaEvent_t event = nullptr;
  check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  return event;
}

void CudaRuntime::destroy_event(Event event) noexcept {
  (void)taken(cudaEventDestroy(event_of(event)));
}

void CudaRuntime::record(Event event, Stream stream) {
  check(cudaEventRecord(event_of(event), stream_of(stream)), "cudaEventRecord");
}

void CudaRuntime::wait(Stream stream, Event event) {
  check(cudaStreamWaitEvent(stream_of(stream), event_of(event), 0), "cudaStreamWaitEvent");
}

bool CudaRuntime::is_complete(Event event) {
  const RelaxedCapture relaxed;
  const cudaError_t status = taken(cudaEventQuery(event_of(event)));
  if (status == cudaErrorNotReady) return false;
  check(status, "cudaEventQuery");
  return true;
}

void* CudaRuntime::allocate(size_t nbytes) {
  const RelaxedCapture relaxed;
  void* memory = nullptr;
  cudaError_t status = taken(cudaMalloc(&memory, nbytes));
  if (status == cudaErrorMemoryAllocation && !is_capturing(current_stream())) {
    // torch keeps what its tensors have freed.
    c10::cuda::CUDACachingAllocator::emptyCache();
    status = taken(cudaMalloc(&memory, nbytes));
  }
  check<ResourceError>(status, "cudaMalloc of ", nbytes,
                       " bytes (smaller micro-batches or buckets need less)");
  return memory;
}

void CudaRuntime::deallocate(void* memory) noexcept {
  const RelaxedCapture relaxed;
  (void)taken(cudaFree(memory));
}

void* CudaRuntime::allocate_pinned(size_t nbytes) {
  const RelaxedCapture relaxed;
  void* memory = nullptr;
  check<ResourceError>(cudaMallocHost(&memory, nbytes), "cudaMallocHost of ", nbytes,
                       " bytes (what the container's memory and `ulimit -l` allow)");
  return memory;
}

void CudaRuntime::free_pinned(void* memory) noexcept {
  const RelaxedCapture relaxed;
  (void)taken(cudaFreeHost(memory));
}

void CudaRuntime::copy(void* to, const void* from, size_t nbytes, Stream stream) {
  check(cudaMemcpyAsync(to, from, nbytes, cudaMemcpyDefault, stream_of(stream)), "cudaMemcpyAsync");
}

void CudaRuntime::fill_zero(void* memory, size_t nbytes, Stream stream) {
  check(cudaMemsetAsync(memory, 0, nbytes, stream_of(stream)), "cudaMemsetAsync");
}

void CudaRuntime::launch(const Kernel& kernel, const void* arguments, int num_blocks,
                         Stream stream) {
  // CUDA copies the arguments before it returns.
  void* parameters[] = {const_cast<void*>(arguments)};
  check(cudaLaunchKernel(function_of(kernel), dim3(static_cast<unsigned>(num_blocks)),
                         dim3(static_cast<unsigned>(kernel.num_threads)), parameters, 0,
                         stream_of(stream)),
        "launching ", kernel.name);
}

const void* CudaRuntime::function_of(const Kernel& kernel) {
  const std::lock_guard lock(mutex_);
  const void*& function = functions_[&kernel];
  if (function == nullptr) {
    function = find_device_function(kernel.name);
    PYDIST_CHECK(function != nullptr, Error, "pydist._cuda has no kernel ", kernel.name,
                 ": it and pydist._C are of different builds; reinstall pydist");
  }
  return function;
}

}  // namespace pydist
