// Owners of a device's streams, events and memory; and what orders two streams.
#pragma once

#include <cstddef>
#include <utility>

#include "base/device_runtime.h"

namespace pydist {

// The calling thread's current device, until the end of the scope.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) : before_(device_runtime()->current_device()), now_(device) {
    device_runtime()->set_current_device(now_);  // that may differ from what was restored
  }
  // A device that has failed says so at the next call; a destructor must not.
  ~DeviceGuard() {
    if (before_ != now_) device_runtime()->restore_device(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_;
  int now_;
};

class OwnedStream {
 public:
  OwnedStream() : stream_(device_runtime()->make_stream()) {}
  ~OwnedStream() { device_runtime()->destroy_stream(stream_); }
  OwnedStream(const OwnedStream&) = delete;
  OwnedStream& operator=(const OwnedStream&) = delete;
  Stream get() const { return stream_; }

 private:
  Stream stream_;
};

class OwnedEvent {
 public:
  OwnedEvent() : event_(device_runtime()->make_event()) {}
  ~OwnedEvent() {
    if (event_ != nullptr) device_runtime()->destroy_event(event_);
  }
  OwnedEvent(OwnedEvent&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
  OwnedEvent& operator=(OwnedEvent&& other) noexcept {
    std::swap(event_, other.event_);
    return *this;
  }
  Event get() const { return event_; }
  void record(Stream stream) { device_runtime()->record(event_, stream); }
  bool is_complete() const { return device_runtime()->is_complete(event_); }
  // What is enqueued on `stream` from now on comes after what was recorded.
  void block(Stream stream) const { device_runtime()->wait(stream, event_); }

 private:
  Event event_;
};

}  // namespace pydist
