#include "bucket/gradient_allocator.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <mutex>

#include "transport/arena.h"

namespace pydist {

// Sizes in ascending order with how many gradients of each are still expected.
struct ExpectedSizes::State {
  struct Entry {
    size_t nbytes;
    std::atomic<int> count;
    Entry(size_t n, int c) : nbytes(n), count(c) {}
    Entry(const Entry& other) : nbytes(other.nbytes), count(other.count.load()) {}
  };
  std::vector<Entry> entries;
  std::atomic<bool> armed{true};

  Entry* find(size_t nbytes) {
    const auto found =
        std::lower_bound(entries.begin(), entries.end(), nbytes,
                         [](const Entry& entry, size_t n) { return entry.nbytes < n; });
    return found != entries.end() && found->nbytes == nbytes ? &*found : nullptr;
  }
};

namespace {

// The allocator's fast path reads only this: a thread-local pointer, null unless armed here.
thread_local ExpectedSizes::State* armed_here = nullptr;
// Keeps what armed_here points to alive on this thread.
thread_local std::shared_ptr<ExpectedSizes::State> armed_owner;

c10::DeleterFnPtr base_deleter = nullptr;

void free_block(void* pointer) {
  Arena* arena = Arena::if_exists();
  if (arena != nullptr && arena->contains(pointer)) {
    c10::profiledCPUMemoryReporter().Delete(pointer);
    arena->deallocate(pointer);
  } else {
    base_deleter(pointer);
  }
}

class ArenaAwareAllocator final : public c10::Allocator {
 public:
  explicit ArenaAwareAllocator(c10::Allocator* base) : base_(base) {}

  c10::DataPtr allocate(size_t nbytes) override {
    if (armed_here != nullptr && nbytes > 0) {
      if (void* block = allocate_expected(nbytes)) {
        return {block, block, &free_block, c10::Device(c10::DeviceType::CPU)};
      }
    }
    c10::DataPtr data = base_->allocate(nbytes);
    // The base promises, by its raw_deleter, that its context is the pointer; so ours may free what
    // it allocates.
    (void)data.compare_exchange_deleter(base_deleter, &free_block);
    return data;
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }

  void copy_data(void* target, const void* source, std::size_t nbytes) const override {
    default_copy_data(target, source, nbytes);
  }

 private:
  static void* allocate_expected(size_t nbytes) {
    if (!armed_here->armed.load(std::memory_order_relaxed)) {
      armed_here = nullptr;
      armed_owner.reset();
      return nullptr;
    }
    const auto* entry = armed_here->find(nbytes);
    if (entry == nullptr || entry->count.load(std::memory_order_relaxed) <= 0) return nullptr;
    void* block = Arena::instance().try_allocate(nbytes);
    if (block != nullptr) c10::profiledCPUMemoryReporter().New(block, nbytes);
    return block;
  }

  c10::Allocator* base_;
};

std::string install_once() {
  const char* wish = std::getenv("PYDIST_ALLOCATOR");
  if (wish != nullptr && std::string(wish) == "0") return "PYDIST_ALLOCATOR=0";
  c10::Allocator* base = c10::GetCPUAllocator();
  base_deleter = base->raw_deleter();
  if (base_deleter == nullptr) return "torch's CPU allocator has no raw deleter";
  const c10::DataPtr probe = base->allocate(64);
  if (probe.get() != probe.get_context() || probe.get_deleter() != base_deleter) {
    return "torch's CPU allocator hands out blocks that its raw deleter cannot free";
  }
  // Leaked: storages keep pointers to it. Priority 0 is what other libraries use, so whoever
  // installs later wins.
  c10::SetCPUAllocator(new ArenaAwareAllocator(base), 0);
  return "";
}

}  // namespace

const std::string& GradientAllocator::install() {
  static const std::string reason = install_once();
  return reason;
}

ExpectedSizes::ExpectedSizes() = default;

ExpectedSizes::~ExpectedSizes() { disarm(); }

void ExpectedSizes::arm(const std::vector<size_t>& nbytes) {
  disarm();
  if (nbytes.empty()) return;
  std::vector<size_t> sorted = nbytes;
  std::sort(sorted.begin(), sorted.end());
  state_ = std::make_shared<State>();
  for (const size_t size : sorted) {
    if (state_->entries.empty() || state_->entries.back().nbytes != size) {
      state_->entries.emplace_back(size, 0);
    }
    state_->entries.back().count.fetch_add(1, std::memory_order_relaxed);
  }
  armed_owner = state_;
  armed_here = state_.get();
}

void ExpectedSizes::arrived(size_t nbytes) {
  if (state_ == nullptr) return;
  if (auto* entry = state_->find(nbytes)) entry->count.fetch_sub(1, std::memory_order_relaxed);
}

void ExpectedSizes::disarm() {
  if (state_ == nullptr) return;
  state_->armed.store(false, std::memory_order_relaxed);
  if (armed_owner == state_) {
    armed_here = nullptr;
    armed_owner.reset();
  }
  state_.reset();
}

}  // namespace pydist
