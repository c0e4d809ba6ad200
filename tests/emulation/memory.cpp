#include "memory.h"

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <new>

#include "device.h"
#include "faults.h"

namespace pydist::emulation {

namespace {

struct Owned {
  size_t nbytes;
  Block kind;
};

std::mutex mutex;
std::map<const char*, Owned>& blocks() {
  static auto* blocks = new std::map<const char*, Owned>();
  return *blocks;
}

constexpr size_t kAlignment = 512;
constexpr int kPoison = 0xff;  // NaN of every floating type

}  // namespace

void* allocate_block(size_t nbytes, Block kind) {
  const size_t rounded = (nbytes + kAlignment - 1) / kAlignment * kAlignment + kAlignment;
  void* memory = std::aligned_alloc(kAlignment, rounded);
  if (memory == nullptr) throw std::bad_alloc();
  std::memset(memory, kPoison, rounded);
  Device::instance().allocated(memory, nbytes);
  const std::lock_guard<std::mutex> lock(mutex);
  blocks()[static_cast<char*>(memory)] = {nbytes, kind};
  return memory;
}

void free_block(void* memory, Block kind, const char* user) {
  if (memory == nullptr) return;
  size_t nbytes = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = blocks().find(static_cast<char*>(memory));
    if (found == blocks().end() || found->second.kind != kind) {
      record_fault(concat(user, " frees ", memory, ", which is no such block, or no longer"));
      return;
    }
    nbytes = found->second.nbytes;
    blocks().erase(found);
  }
  Device::instance().host_frees(concat("the host (", user, ")"), memory, nbytes);
  // Work that is still under way is a fault that was found just now, and must not corrupt the heap.
  if (has_fault()) return;
  std::memset(memory, kPoison, nbytes);
  std::free(memory);
}

bool lies_in(const void* data, size_t nbytes, Block kind) {
  const char* begin = static_cast<const char*>(data);
  const std::lock_guard<std::mutex> lock(mutex);
  auto next = blocks().upper_bound(begin);
  if (next == blocks().begin()) return false;
  const auto& [start, owned] = *std::prev(next);
  return owned.kind == kind && begin + nbytes <= start + owned.nbytes;
}

}  // namespace pydist::emulation
