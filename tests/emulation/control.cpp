#include "control.h"

#include <exception>
#include <memory>
#include <string>

#include "device.h"
#include "faults.h"
#include "nccl_group.h"
#include "options.h"
#include "planted.h"

using namespace pydist;
using namespace pydist::emulation;

namespace {

std::string& error_text() {
  static thread_local std::string text;
  return text;
}

template <class Body>
int guarded(const Body& body) {
  try {
    body();
    return 0;
  } catch (const std::exception& error) {
    error_text() = error.what();
    return 1;
  }
}

bool is_named(const std::string& name, const char* first, const char* second) {
  if (name != first && name != second) throw UsageError(concat(name, ": ", first, " or ", second));
  return name == first;
}

struct FusedArguments {
  float* to;
  const float* from;
  float factor;
  size_t count;
  bool declares;
};

void run_fused(const void* arguments, int) {
  const auto& a = *static_cast<const FusedArguments*>(arguments);
  for (size_t i = 0; i < a.count; ++i) a.to[i] = a.to[i] * a.factor + a.from[i];
}

void visit_fused(const void* arguments, const VisitAccess& visit) {
  const auto& a = *static_cast<const FusedArguments*>(arguments);
  if (!a.declares) return;
  visit(Access::kRead, a.from, a.count * sizeof(float));
  visit(Access::kRead, a.to, a.count * sizeof(float));
  visit(Access::kWrite, a.to, a.count * sizeof(float));
}

constexpr Kernel kFused = {"fused", sizeof(FusedArguments), 128, &run_fused, &visit_fused};

Device& device() { return Device::instance(); }

}  // namespace

extern "C" {

DeviceRuntime* pydist_emulated_device() { return &emulated_runtime(); }

void pydist_emulated_allocated(void* data, size_t nbytes, void** stream) {
  *stream = device().current_stream();
  device().allocated(data, nbytes);
}

void pydist_emulated_freed(void* data, size_t nbytes, void* stream) {
  if (data == nullptr) return;
  device().torch_frees(data, nbytes, static_cast<StreamState*>(stream));
}

const char* emulation_error() { return error_text().c_str(); }

int emulation_set_option(const char* name, double value) {
  return guarded([&] {
    std::atomic<double>* option = options().find(name);
    if (option == nullptr) throw UsageError(concat("there is no option ", name));
    *option = value;
  });
}

int emulation_plant(const char* bug, int64_t nth) {
  return guarded([&] {
    if (!plant(bug, nth)) throw UsageError(concat("there is no bug ", bug));
  });
}

// Faults of the test before are not forgotten here: whoever ran it has to look at them.
int emulation_reset(uint64_t seed) {
  return guarded([&] {
    options().reset();
    remove_planted();
    reset_nccl();
    device().reset(seed);
    raise_fault();
  });
}

int emulation_synchronize() {
  return guarded([] {
    device().synchronize();
    raise_fault();
  });
}

int emulation_hold(int holds) {
  return guarded([&] { device().hold(holds != 0); });
}

int emulation_num_launches(uint64_t* count) {
  return guarded([&] { *count = num_launches(); });
}

const char* emulation_take_faults() {
  static thread_local std::string text;
  text.clear();
  for (const std::string& fault : take_faults()) text += fault + "\n";
  return text.c_str();
}

int emulation_make_torch_stream(void** stream) {
  return guarded([&] { *stream = device().make_stream("torch's", true); });
}

int emulation_set_current_stream(void* stream) {
  return guarded([&] { device().set_current_stream(device().stream(stream, "torch")); });
}

int emulation_begin_capture(void* stream) {
  return guarded([&] { device().begin_capture(*device().stream(stream, "capture")); });
}

int emulation_end_capture(void* stream, void** graph) {
  return guarded([&] {
    // Graphs are few, and stay.
    *graph = new std::shared_ptr<Graph>(device().end_capture(*device().stream(stream, "capture")));
  });
}

int emulation_replay(void* graph, void* stream) {
  return guarded([&] {
    device().replay(*static_cast<std::shared_ptr<Graph>*>(graph),
                    *device().stream(stream, "replay()"));
  });
}

int emulation_touch(const char* actor, int writes, const void* data, size_t nbytes) {
  return guarded([&] {
    const Access access = writes != 0 ? Access::kWrite : Access::kRead;
    if (is_named(actor, "host", "torch")) {
      device().host_touches(access, data, nbytes);
    } else {
      device().torch_touches(access, data, nbytes);
    }
  });
}

int emulation_make_stream(void** stream) {
  return guarded([&] { *stream = emulated_runtime().make_stream(); });
}

int emulation_destroy_stream(void* stream) {
  return guarded([&] { emulated_runtime().destroy_stream(stream); });
}

int emulation_make_event(void** event) {
  return guarded([&] { *event = emulated_runtime().make_event(); });
}

int emulation_destroy_event(void* event) {
  return guarded([&] { emulated_runtime().destroy_event(event); });
}

int emulation_record(void* event, void* stream) {
  return guarded([&] { emulated_runtime().record(event, stream); });
}

int emulation_wait(void* stream, void* event) {
  return guarded([&] { emulated_runtime().wait(stream, event); });
}

int emulation_is_complete(void* event, int* complete) {
  return guarded([&] { *complete = emulated_runtime().is_complete(event); });
}

int emulation_relax_capture_checks() {
  return guarded([] { emulated_runtime().relax_capture_checks(); });
}

int emulation_allocate(const char* kind, size_t nbytes, void** memory) {
  return guarded([&] {
    *memory = is_named(kind, "device", "pinned") ? emulated_runtime().allocate(nbytes)
                                                 : emulated_runtime().allocate_pinned(nbytes);
  });
}

int emulation_deallocate(const char* kind, void* memory) {
  return guarded([&] {
    if (is_named(kind, "device", "pinned")) {
      emulated_runtime().deallocate(memory);
    } else {
      emulated_runtime().free_pinned(memory);
    }
  });
}

int emulation_copy(void* to, const void* from, size_t nbytes, void* stream) {
  return guarded([&] { emulated_runtime().copy(to, from, nbytes, stream); });
}

int emulation_fill_zero(void* memory, size_t nbytes, void* stream) {
  return guarded([&] { emulated_runtime().fill_zero(memory, nbytes, stream); });
}

int emulation_launch(float* to, const float* from, float factor, size_t count, int declares,
                     void* stream) {
  return guarded([&] {
    const FusedArguments arguments = {to, from, factor, count, declares != 0};
    emulated_runtime().launch(kFused, &arguments, 2, stream);
  });
}

}  // extern "C"
