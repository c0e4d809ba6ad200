#include "faults.h"

#include <atomic>
#include <cstdio>
#include <mutex>
#include <utility>

namespace pydist::emulation {

namespace {

std::mutex mutex;
std::vector<std::string>& recorded() {
  static auto* faults = new std::vector<std::string>();
  return *faults;
}
std::atomic<bool> any{false};

}  // namespace

void record_fault(const std::string& text) {
  const std::lock_guard<std::mutex> lock(mutex);
  recorded().push_back(text);
  any = true;
  std::fprintf(stderr, "emulated device: FAULT: %s\n", text.c_str());
  std::fflush(stderr);
}

bool has_fault() { return any; }

void raise_fault() {
  if (!any) return;
  const std::lock_guard<std::mutex> lock(mutex);
  if (!recorded().empty()) throw Fault("the emulated device found a fault: " + recorded().front());
}

std::vector<std::string> take_faults() {
  const std::lock_guard<std::mutex> lock(mutex);
  any = false;
  return std::exchange(recorded(), {});
}

}  // namespace pydist::emulation
