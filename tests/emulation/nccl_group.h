// From NCCL's functions to the streams: groups, calls in progress, and what a call needs to begin.
#pragma once

#include <memory>
#include <string>

#include "device.h"
#include "nccl_communicator.h"
#include "nccl_step.h"

namespace pydist::emulation {

// A fault where this thread has a group of NCCL's open, or a call that goes to this stream is still
// in progress: what is enqueued now would not come after it.
void check_stream_ready(Stream stream, const char* user);

// Of a handle; a fault where it is no communicator, or one that has ended.
std::shared_ptr<CommState> comm_of(const void* handle, const char* user);
std::shared_ptr<CommState> add_comm();  // its handle is its address

// Enqueues the call, or keeps it until the group ends.
nccl::Result submit(const std::shared_ptr<CommState>& comm, NcclCall call, Stream stream);
void start_group();
nccl::Result end_group();

// `done` is tried until it is true: now, for a blocking communicator, else at polls.
nccl::Result pend(const std::shared_ptr<CommState>& comm, const std::string& what,
                  std::function<bool()> done, StreamState* on = nullptr);
nccl::Result poll(const std::shared_ptr<CommState>& comm);
// Waits for what is enqueued; a fault after the time limit.
void drain(const std::shared_ptr<CommState>& comm);
// A fault where the memory is still registered as a window.
void check_no_window(void* memory);
void abort(const std::shared_ptr<CommState>& comm);

void reset_nccl();

}  // namespace pydist::emulation
