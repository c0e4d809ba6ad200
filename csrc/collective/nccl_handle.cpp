#include "collective/nccl_handle.h"

#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <thread>

#include "base/device_handles.h"
#include "base/error.h"
#include "base/fork.h"

namespace pydist {

namespace {

// A caller inside of NCCL for longer waits for the device: because of what is to be aborted.
constexpr std::chrono::seconds kCallLimit{10};
constexpr useconds_t kPoll_us = 10'000;
// Some versions run the end of a communicator in a thread of their own that uses thread-local
// state of the caller, and do not say when it is through.
constexpr unsigned kLinger_s = 60;

// The ends under way. Never destroyed: threads may outlive static objects.
struct Ends {
  std::mutex mutex;
  std::condition_variable fewer;
  int num_threads = 0;  // guarded by mutex
  std::atomic<bool> stopped{false};
};
Ends& ends() {
  static Ends& instance = *new Ends;
  return instance;
}

void linger() { ::sleep(kLinger_s); }

void leave() {
  const std::lock_guard<std::mutex> lock(ends().mutex);
  --ends().num_threads;
  ends().fewer.notify_all();
}

// Each end has a thread of its own: NCCL may wait in it, for peers or for the device's memory to be
// freed, which waits for everything on the device: for another communicator's end, say.
template <class End>
void run_in_thread(const End& end) noexcept {
  if (ends().stopped.load()) return;
  {
    const std::lock_guard<std::mutex> lock(ends().mutex);
    ++ends().num_threads;
  }
  try {
    std::thread([end] {
      nccl::Result result = nccl::kSuccess;
      try {
        result = end();
      } catch (...) {  // the device has failed: the communicator stays for good
      }
      leave();
      if (result == nccl::kInProgress) linger();
    }).detach();
  } catch (...) {  // no thread to be had: the communicator stays for good
    leave();
  }
}

nccl::Result abort_comm(const nccl::Api& api, nccl::Comm comm, int device) {
  device_runtime()->set_current_device(device);
  return api.comm_abort(comm);
}

nccl::Result finish_comm(const nccl::Api& api, nccl::Comm comm, int device) {
  device_runtime()->set_current_device(device);
  nccl::Result result = api.comm_finalize(comm);
  while (result == nccl::kInProgress) {
    ::usleep(kPoll_us);
    if (ends().stopped.load()) return nccl::kSuccess;
    nccl::Result state = nccl::kSuccess;
    const nccl::Result asked = api.comm_get_async_error(comm, &state);
    result = asked == nccl::kSuccess ? state : asked;
  }
  return result == nccl::kSuccess ? api.comm_destroy(comm) : api.comm_abort(comm);
}

}  // namespace

nccl::Result NcclHandle::begin(const nccl::UniqueId& id, const NcclOptions& options) {
  const std::lock_guard<std::timed_mutex> lock(mutex_);
  nccl::Config config;
  config.blocking = 0;
  if (options.max_ctas > 0) config.max_ctas = options.max_ctas;
  nccl::Comm comm = nullptr;
  const nccl::Result result =
      api_.comm_init_rank_config(&comm, options.size, id, options.rank, &config);
  comm_.store(comm);
  return result;
}

nccl::Result NcclHandle::state_locked() {
  const nccl::Comm comm = comm_.load(std::memory_order_relaxed);
  if (comm == nullptr) return nccl::kInvalidUsage;
  nccl::Result state = nccl::kSuccess;
  const nccl::Result asked = api_.comm_get_async_error(comm, &state);
  return asked == nccl::kSuccess ? state : asked;
}

nccl::Result NcclHandle::state() {
  const std::lock_guard<std::timed_mutex> lock(mutex_);
  return state_locked();
}

std::optional<nccl::Result> NcclHandle::state_if_free() {
  const std::unique_lock<std::timed_mutex> lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock() || comm_.load() == nullptr) return std::nullopt;
  return state_locked();
}

std::string NcclHandle::explain(nccl::Result result) {
  const std::lock_guard<std::timed_mutex> lock(mutex_);
  std::string text = concat("NCCL reports \"", api_.get_error_string(result), "\"");
  const char* last = api_.get_last_error(comm_.load(std::memory_order_relaxed));
  if (last != nullptr && *last != '\0') text += concat(": ", last);
  return text;
}

nccl::Comm NcclHandle::take() noexcept {
  if (comm_.load() == nullptr || in_forked_child()) return nullptr;
  const std::unique_lock<std::timed_mutex> lock(mutex_, kCallLimit);
  // Without the lock: a call is stuck, and will return because of this.
  return comm_.exchange(nullptr);
}

void NcclHandle::abort() noexcept {
  const nccl::Comm comm = take();
  if (comm == nullptr) return;
  run_in_thread([&api = api_, comm, device = device_] { return abort_comm(api, comm, device); });
}

void NcclHandle::finish() noexcept {
  const nccl::Comm comm = take();
  if (comm == nullptr) return;
  run_in_thread([&api = api_, comm, device = device_] { return finish_comm(api, comm, device); });
}

void stop_ending_nccl(double timeout_s) {
  if (in_forked_child()) return;
  std::unique_lock<std::mutex> lock(ends().mutex);
  ends().fewer.wait_for(lock, std::chrono::duration<double>(timeout_s),
                        [] { return ends().num_threads == 0; });
  ends().stopped.store(true);
}

}  // namespace pydist
