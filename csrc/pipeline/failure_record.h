// One rank's last failures, as its peers read them in shared memory. Pure.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>

#include "transport/board.h"

namespace pydist {

// A step that failed on some rank.
struct Failure {
  uint64_t generation = 0;
  uint64_t step = 0;
  bool is_mismatch = false;  // ranks disagree about the step; else one of them raised
  std::string text = {};

  // Where a later failure is found in the place of this generation's, it has overwritten it.
  bool ends(uint64_t other_generation, uint64_t other_step) const {
    return generation > other_generation || (generation == other_generation && step <= other_step);
  }
};

// Writer: its rank. Words, not bytes, as readers may find them while they are overwritten; they
// then read again.
class alignas(kCacheLineNbytes) FailureRecord {
 public:
  static constexpr size_t kTextNbytes = 2048;

  // Cheap, to see whether read() has news; 0: no failure yet.
  uint64_t generation() const { return generation_.load(std::memory_order_relaxed); }

  void write(const Failure& failure) {
    const uint64_t version = version_.load(std::memory_order_relaxed);
    version_.store(version + 1, std::memory_order_relaxed);
    // Pairs with the fence in read(): whoever sees a word of the new text sees the odd version too.
    std::atomic_thread_fence(std::memory_order_release);
    const size_t length = std::min(failure.text.size(), kTextNbytes);
    for (size_t at = 0; at < length; at += sizeof(uint64_t)) {
      uint64_t word = 0;
      std::memcpy(&word, failure.text.data() + at, std::min(sizeof(word), length - at));
      words_[at / sizeof(word)].store(word, std::memory_order_relaxed);
    }
    length_.store(length, std::memory_order_relaxed);
    step_.store(failure.step, std::memory_order_relaxed);
    is_mismatch_.store(failure.is_mismatch ? 1 : 0, std::memory_order_relaxed);
    generation_.store(failure.generation, std::memory_order_relaxed);
    version_.store(version + 2, std::memory_order_release);
  }

  // Nothing while it is being written; or for good, if its rank died then.
  std::optional<Failure> read() const {
    const uint64_t version = version_.load(std::memory_order_acquire);
    Failure failure;
    failure.generation = generation();
    failure.step = step_.load(std::memory_order_relaxed);
    failure.is_mismatch = is_mismatch_.load(std::memory_order_relaxed) != 0;
    const size_t length = std::min<size_t>(length_.load(std::memory_order_relaxed), kTextNbytes);
    failure.text.resize(length);
    for (size_t at = 0; at < length; at += sizeof(uint64_t)) {
      const uint64_t word = words_[at / sizeof(uint64_t)].load(std::memory_order_relaxed);
      std::memcpy(failure.text.data() + at, &word, std::min(sizeof(word), length - at));
    }
    std::atomic_thread_fence(std::memory_order_acquire);
    const bool stable = version_.load(std::memory_order_relaxed) == version && version % 2 == 0;
    return stable ? std::optional<Failure>(std::move(failure)) : std::nullopt;
  }

 private:
  std::atomic<uint64_t> generation_;
  std::atomic<uint64_t> version_;  // odd while it is being written
  std::atomic<uint64_t> step_;
  std::atomic<uint64_t> is_mismatch_;
  std::atomic<uint64_t> length_;
  std::atomic<uint64_t> words_[kTextNbytes / sizeof(uint64_t)];
};

// A rank that fails without waiting for the others may be some failures ahead of them.
class FailureRecords {
 public:
  FailureRecord& of(uint64_t generation) { return records_[generation % kNumRecords]; }
  const FailureRecord& of(uint64_t generation) const { return records_[generation % kNumRecords]; }

 private:
  static constexpr size_t kNumRecords = 8;
  FailureRecord records_[kNumRecords];
};

}  // namespace pydist
