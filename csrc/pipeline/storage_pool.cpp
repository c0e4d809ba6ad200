#include "pipeline/storage_pool.h"

#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <atomic>

namespace pydist {

namespace {

// Steps that memory may lie idle: train and evaluate may take turns.
constexpr uint64_t kIdleSteps = 8;

c10::Storage allocate(size_t nbytes) {
  return c10::Storage(c10::Storage::use_byte_size_t(), nbytes, c10::GetCPUAllocator(), true);
}

}  // namespace

StoragePool::Entry::Entry(size_t nbytes)
    : storage(allocate(nbytes)),
      data(storage.data_ptr().get()),
      context(storage.data_ptr().get_context()),
      deleter(storage.data_ptr().get_deleter()) {}

// A weak reference could become a strong one at any time.
bool StoragePool::Entry::is_free() const {
  constexpr size_t kOursAndThatOfAllStrongOnes = 2;
  if (storage.use_count() != 1) return false;
  if (storage.getWeakStorageImpl().weak_use_count() != kOursAndThatOfAllStrongOnes) return false;
  // Pairs with the last release by another thread, whose reads of the memory are over then.
  std::atomic_thread_fence(std::memory_order_acquire);
  return true;
}

bool StoragePool::Entry::is_intact() const {
  const c10::DataPtr& pointer = storage.data_ptr();
  return pointer.get() == data && pointer.get_context() == context &&
         pointer.get_deleter() == deleter;
}

c10::Storage StoragePool::take(size_t nbytes) {
  if (nbytes == 0) return allocate(0);
  std::vector<Entry>& candidates = entries_[nbytes];
  for (size_t i = 0; i < candidates.size(); ++i) {
    Entry& entry = candidates[i];
    if (!entry.is_free()) continue;
    if (entry.is_intact() && entry.storage.nbytes() == nbytes) {
      entry.last_step = step_;
      return entry.storage;
    }
    std::swap(entry, candidates.back());
    candidates.pop_back();
    nbytes_ -= nbytes;
    --i;
  }
  Entry& entry = candidates.emplace_back(nbytes);
  entry.last_step = step_;
  nbytes_ += nbytes;
  return entry.storage;
}

void StoragePool::end_step() {
  ++step_;
  for (auto it = entries_.begin(); it != entries_.end();) {
    auto& [nbytes, entries] = *it;
    const auto is_idle = [&](const Entry& entry) { return entry.last_step + kIdleSteps < step_; };
    const auto end = std::remove_if(entries.begin(), entries.end(), is_idle);
    nbytes_ -= nbytes * static_cast<size_t>(entries.end() - end);
    entries.erase(end, entries.end());
    it = entries.empty() ? entries_.erase(it) : std::next(it);
  }
}

}  // namespace pydist
