// The device as the engine's seam (base/device_runtime.h) has it.
#include <atomic>
#include <cstring>
#include <string>
#include <vector>

#include "control.h"
#include "device.h"
#include "faults.h"
#include "memory.h"
#include "nccl_group.h"
#include "planted.h"

namespace pydist::emulation {

namespace {

std::atomic<uint64_t> launches{0};

constexpr size_t kMaxArgumentsNbytes = 4096;  // of CUDA before 12.1

uint64_t checksum(const void* data, size_t nbytes) {
  uint64_t hash = 14695981039346656037ULL;
  const auto* bytes = static_cast<const unsigned char*>(data);
  for (size_t i = 0; i < nbytes; ++i) hash = (hash ^ bytes[i]) * 1099511628211ULL;
  return hash;
}

class EmulatedRuntime final : public DeviceRuntime {
 public:
  const char* name() const override { return "emulated"; }
  int current_device() override { return 0; }
  void set_current_device(int device) override {
    if (device != 0) record_fault(concat("there is no device ", device));
    raise_fault();
  }
  void restore_device(int device) noexcept override {
    if (device != 0) record_fault(concat("there is no device ", device));
  }
  int num_processors() override { return 2; }

  Stream current_stream() override {
    StreamState* stream = Device::instance().current_stream();
    return stream == Device::instance().stream(nullptr, "") ? nullptr : stream;
  }
  Stream make_stream() override {
    raise_fault();
    return Device::instance().make_stream("side", false);
  }
  void destroy_stream(Stream stream) noexcept override {
    Device::instance().destroy_stream(static_cast<StreamState*>(stream));
  }
  bool is_capturing(Stream stream) override {
    return stream_of(stream, "is_capturing()")->capture != nullptr;
  }
  void relax_capture_checks() override { Device::instance().relax_capture_checks(); }

  Event make_event() override {
    raise_fault();
    return Device::instance().make_event();
  }
  void destroy_event(Event event) noexcept override {
    Device::instance().destroy_event(static_cast<EventState*>(event));
  }
  void record(Event event, Stream stream) override {
    check_stream_ready(stream, "record()");
    if (strikes(Bug::kNoRecord)) return;
    Device::instance().record(*event_of(event, "record()"), *stream_of(stream, "record()"));
  }
  void wait(Stream stream, Event event) override {
    check_stream_ready(stream, "wait()");
    if (strikes(Bug::kNoWait)) return;
    Device::instance().wait(*stream_of(stream, "wait()"), *event_of(event, "wait()"));
  }
  bool is_complete(Event event) override {
    Device::instance().check_capture_allows("is_complete()");
    return Device::instance().is_complete(*event_of(event, "is_complete()"));
  }

  // Also while a stream is captured: CUDA's runtime of ours tells CUDA that it may.
  void* allocate(size_t nbytes) override { return allocate_block(nbytes, Block::kDevice); }
  void deallocate(void* memory) noexcept override {
    free_block(memory, Block::kDevice, "deallocate()");
  }
  void* allocate_pinned(size_t nbytes) override { return allocate_block(nbytes, Block::kPinned); }
  void free_pinned(void* memory) noexcept override {
    free_block(memory, Block::kPinned, "free_pinned()");
  }
  void copy(void* to, const void* from, size_t nbytes, Stream stream) override;
  void fill_zero(void* memory, size_t nbytes, Stream stream) override;
  void launch(const Kernel& kernel, const void* arguments, int num_blocks, Stream stream) override;

 private:
  static StreamState* stream_of(Stream stream, const char* user) {
    return Device::instance().stream(stream, user);
  }
  static EventState* event_of(Event event, const char* user) {
    return Device::instance().event(event, user);
  }
};

void EmulatedRuntime::copy(void* to, const void* from, size_t nbytes, Stream stream) {
  check_stream_ready(stream, "copy()");
  if (strikes(Bug::kCopiedTooFar)) ++nbytes;
  const std::string what = concat("copy() of ", nbytes, " bytes");
  Call call;
  call.what = what;
  call.visit = [=](const VisitAccess& visit) {
    visit(Access::kRead, from, nbytes);
    visit(Access::kWrite, to, nbytes);
  };
  // What the host has put into pinned memory must not be changed by it until the copy is done.
  const bool is_watched =
      lies_in(from, nbytes, Block::kPinned) && !Device::instance().is_written_by_a_stream(from);
  call.begin = [=]() -> Step {
    return [=, sum = is_watched ? checksum(from, nbytes) : 0] {
      if (is_watched && checksum(from, nbytes) != sum) {
        record_fault(what + ": the host has changed the pinned source before the copy was done");
      }
      std::memmove(to, from, nbytes);
      return true;
    };
  };
  Device::instance().enqueue(*stream_of(stream, "copy()"), call);
}

void EmulatedRuntime::fill_zero(void* memory, size_t nbytes, Stream stream) {
  check_stream_ready(stream, "fill_zero()");
  Call call;
  call.what = concat("fill_zero() of ", nbytes, " bytes");
  call.visit = [=](const VisitAccess& visit) { visit(Access::kWrite, memory, nbytes); };
  call.begin = [=]() -> Step {
    return [=] {
      std::memset(memory, 0, nbytes);
      return true;
    };
  };
  Device::instance().enqueue(*stream_of(stream, "fill_zero()"), call);
}

void EmulatedRuntime::launch(const Kernel& kernel, const void* arguments, int num_blocks,
                             Stream stream) {
  check_stream_ready(stream, kernel.name);
  if (strikes(Bug::kWrongLaunch)) stream = nullptr;
  ++launches;
  if (num_blocks < 1 || kernel.num_threads < 1 || kernel.num_threads > 1024 ||
      kernel.arguments_nbytes > kMaxArgumentsNbytes) {
    record_fault(concat(kernel.name, " cannot be launched: ", num_blocks, " blocks of ",
                        kernel.num_threads, " threads, ", kernel.arguments_nbytes,
                        " bytes of arguments"));
    raise_fault();
  }
  const auto* bytes = static_cast<const char*>(arguments);
  // As the launch copies them; aligned as any struct may need.
  auto copied = std::make_shared<std::vector<std::max_align_t>>(
      kernel.arguments_nbytes / sizeof(std::max_align_t) + 1);
  std::memcpy(copied->data(), bytes, kernel.arguments_nbytes);
  Call call;
  call.what = concat(kernel.name, "()");
  call.visit = [=](const VisitAccess& visit) { kernel.visit_accesses(copied->data(), visit); };
  call.begin = [=]() -> Step {
    return [=] {
      kernel.run_on_host(copied->data(), num_blocks);
      return true;
    };
  };
  Device::instance().enqueue(*stream_of(stream, kernel.name), call);
}

}  // namespace

uint64_t num_launches() { return launches; }

DeviceRuntime& emulated_runtime() {
  static auto* runtime = new EmulatedRuntime();
  return *runtime;
}

}  // namespace pydist::emulation
