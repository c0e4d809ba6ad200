// What is offered to the engine's loader and to tests/emulated.py, which calls it through ctypes:
// functions return 0, or 1 where emulation_error() says why.
#pragma once

#include "base/device_runtime.h"

namespace pydist::emulation {

DeviceRuntime& emulated_runtime();
uint64_t num_launches();  // of kernels, since the start

}  // namespace pydist::emulation

#pragma GCC visibility push(default)

extern "C" {

pydist::DeviceRuntime* pydist_emulated_device();
// Of torch's allocator; `stream` is the current one at allocation.
void pydist_emulated_allocated(void* data, size_t nbytes, void** stream);
void pydist_emulated_freed(void* data, size_t nbytes, void* stream);

const char* emulation_error();
int emulation_set_option(const char* name, double value);
int emulation_plant(const char* bug, int64_t nth);
int emulation_reset(uint64_t seed);
int emulation_synchronize();
int emulation_hold(int holds);
int emulation_num_launches(uint64_t* count);
// One a line, and forgets them.
const char* emulation_take_faults();

// A stream that torch's operations may run on.
int emulation_make_torch_stream(void** stream);
int emulation_set_current_stream(void* stream);
int emulation_begin_capture(void* stream);
int emulation_end_capture(void* stream, void** graph);
int emulation_replay(void* graph, void* stream);
// actor: "host" or "torch", which acts on the current stream.
int emulation_touch(const char* actor, int writes, const void* data, size_t nbytes);

// The device's seam, for tests of the emulation itself.
int emulation_make_stream(void** stream);
int emulation_destroy_stream(void* stream);
int emulation_make_event(void** event);
int emulation_destroy_event(void* event);
int emulation_record(void* event, void* stream);
int emulation_wait(void* stream, void* event);
int emulation_is_complete(void* event, int* complete);
int emulation_relax_capture_checks();
// kind: "device" or "pinned".
int emulation_allocate(const char* kind, size_t nbytes, void** memory);
int emulation_deallocate(const char* kind, void* memory);
int emulation_copy(void* to, const void* from, size_t nbytes, void* stream);
int emulation_fill_zero(void* memory, size_t nbytes, void* stream);
// to[i] = to[i] * factor + from[i], of float32. With declares == 0 its accesses are kept secret.
int emulation_launch(float* to, const float* from, float factor, size_t count, int declares,
                     void* stream);
}

#pragma GCC visibility pop
