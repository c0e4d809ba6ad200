// Bugs that a test plants into what the engine does, as if its code had them: the engine itself is
// the real one, and what goes over the device's seam is changed.
#pragma once

#include <atomic>
#include <string>

namespace pydist::emulation {

enum class Bug : uint8_t {
  kNoWait,          // a stream does not wait for an event
  kNoRecord,        // an event is not recorded again
  kNoGroupEnd,      // a group of NCCL's stays open
  kWrongCount,      // one element less than the peers
  kWrongDType,      // another type than the peers
  kWrongOrder,      // a collective comes after the one that follows it
  kWrongStream,     // a call of NCCL's is enqueued on the current stream
  kFreedEarly,      // its buffer is freed as soon as it is enqueued
  kReusedEarly,     // its buffer is overwritten by the current stream as soon as it is enqueued
  kUsedAfterAbort,  // the communicator is aborted before the call
  kNotPolled,       // a call that is in progress counts as done
  kCopiedTooFar,    // a copy of one byte more
  kWrongLaunch,     // a kernel runs on the default stream instead of its own
  kCount,
};

// Plants the bug at the nth (from 0) of the occasions to come. False where the name is unknown.
bool plant(const std::string& name, int64_t nth);
// Whether this occasion is the one.
bool strikes(Bug bug);
void remove_planted();

}  // namespace pydist::emulation
