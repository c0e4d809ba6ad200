// Lets autograd write gradients straight into the arena: torch's CPU allocator with an exception
// for expected sizes.
//
// Installed once and never removed: oneDNN frees through whatever allocator is current at that
// moment, and every storage keeps a pointer to the allocator that made it. It delegates to the
// allocator that was there before, except while armed on the calling thread, when a request for
// exactly the size of a gradient that is still expected is served from the arena. Blocks of both
// kinds carry the same deleter, which tells them apart by address.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

namespace pydist {

class GradientAllocator {
 public:
  // Installs at the first call. Returns an empty string, or why gradients cannot be born in the
  // arena here.
  static const std::string& install();
};

// The sizes that the allocator serves from the arena; armed on one thread at a time, cheap to copy
// around.
class ExpectedSizes {
 public:
  ExpectedSizes();
  ~ExpectedSizes();
  ExpectedSizes(const ExpectedSizes&) = delete;

  // Arms the calling thread with these sizes (one entry a gradient), disarming whatever was armed.
  void arm(const std::vector<size_t>& nbytes);
  // One gradient of this size has arrived.
  void arrived(size_t nbytes);
  // May be called from any thread; the allocator stops serving at once.
  void disarm();

  struct State;

 private:
  std::shared_ptr<State> state_;
};

}  // namespace pydist
