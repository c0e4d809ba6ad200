#include "collective/nccl_memory.h"

#include <algorithm>

#include "base/check.h"

namespace pydist {

namespace {

constexpr size_t kAlignment = 4096;  // what a window needs
constexpr useconds_t kPoll_us = 1'000;

size_t rounded(size_t nbytes) {
  return (std::max<size_t>(nbytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
}

}  // namespace

// Through the Store, as it happens a few times in a run: no rank may wait for one that gave up.
bool NcclMemory::agree_on(bool mine, const char* what) {
  const uint64_t ballot = num_ballots_++;
  watch_.meeting().vote(ballot, mine);
  std::optional<bool> outcome;
  watch_.await([&] { return (outcome = watch_.meeting().outcome(ballot)).has_value(); }, kPoll_us,
               watch_.options().timeout_s,
               [&] {
                 return concat(watch_.me(), " waited ", watch_.options().timeout_s,
                               " s for the other ranks to agree on ", what);
               });
  return *outcome;
}

void NcclMemory::agree() {
  const nccl::Api& api = watch_.handle().api();
  const bool has_all = api.mem_alloc != nullptr && api.mem_free != nullptr &&
                       api.comm_window_register != nullptr && api.comm_window_deregister != nullptr;
  is_registering_ = watch_.options().size > 1 && agree_on(has_all, "registered memory");
}

NcclMemory::Block NcclMemory::allocate(size_t nbytes) {
  DeviceRuntime& runtime = *device_runtime();
  PYDIST_CHECK(!is_capturing(), UsageError,
               "memory for communication is needed while a graph is captured: run the "
               "step a few times before capturing it, with the same sizes");
  Block block;
  if (is_registering_) block = allocate_registered(rounded(nbytes));
  if (block.data == nullptr) block = allocate_scratch(nbytes);
  runtime.fill_zero(block.data, rounded(nbytes), stream_);
  return block;
}

NcclMemory::Block NcclMemory::allocate_scratch(size_t nbytes) {
  Block block;
  block.data = device_runtime()->allocate(rounded(nbytes));
  return block;
}

// Without data where a rank has no such memory: then on all ranks.
NcclMemory::Block NcclMemory::allocate_registered(size_t nbytes) {
  NcclHandle& handle = watch_.handle();
  Block block;
  const bool has_memory = handle.api().mem_alloc(&block.data, nbytes) == nccl::kSuccess;
  if (!agree_on(has_memory, "memory")) {
    if (has_memory) handle.api().mem_free(block.data);
    return {};
  }
  block.is_nccls = true;
  // NCCL may still write there after a wait that has failed: then it stays, as the memory does.
  auto* const window = new nccl::Window(nullptr);
  nccl::Result result = handle.run([&](nccl::Comm comm) {
    return handle.api().comm_window_register(comm, block.data, nbytes, window,
                                             nccl::kWindowCollSymmetric);
  });
  const auto operation = [] { return std::string("registering memory"); };
  watch_.await(
      [&] {
        if (result == nccl::kInProgress) result = handle.state();
        return result != nccl::kInProgress;
      },
      kPoll_us, watch_.last_resort_s(), operation);
  if (result != nccl::kSuccess) watch_.raise(result, operation());
  block.window = *window;
  delete window;
  return block;
}

void NcclMemory::release(const Block& block) noexcept {
  try {
    const DeviceGuard guard(watch_.options().device);
    Released released;
    released.block = block;
    const std::lock_guard<std::mutex> lock(mutex_);
    released_.push_back(std::move(released));
    if (!is_capturing()) is_past(released_.back());  // records
  } catch (...) {  // the device has failed: nothing can be freed any more
  }
}

bool NcclMemory::is_capturing() const {
  DeviceRuntime& runtime = *device_runtime();
  return runtime.is_capturing(stream_) || runtime.is_capturing(runtime.current_stream());
}

bool NcclMemory::is_past(Released& released) {
  if (!released.is_recorded) {
    released.here.record(stream_);
    released.there.record(device_runtime()->current_stream());
    released.is_recorded = true;
  }
  return released.here.is_complete() && released.there.is_complete();
}

bool NcclMemory::sweep() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (released_.empty() || is_capturing()) return released_.empty();
  for (size_t i = released_.size(); i-- > 0;) {
    if (!is_past(released_[i])) continue;
    free(released_[i].block);
    std::swap(released_[i], released_.back());
    released_.pop_back();
  }
  return released_.empty();
}

void NcclMemory::free(const Block& block) {
  if (!block.is_nccls) return device_runtime()->deallocate(block.data);
  // An aborted communicator may be unmapping its windows at this very moment: they stay.
  if (watch_.has_failed()) return;
  NcclHandle& handle = watch_.handle();
  if (block.window != nullptr) {
    const nccl::Result result = handle.run(
        [&](nccl::Comm comm) { return handle.api().comm_window_deregister(comm, block.window); });
    if (result != nccl::kSuccess) return;
  }
  handle.api().mem_free(block.data);
}

}  // namespace pydist
