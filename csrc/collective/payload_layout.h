// Where everything of a communicator lies in its board's payload. Pure arithmetic.
//
//   | claims | calls | flags | splits | eager | staging | results | message rings |
//
// Each part is an array over ranks (rings: over ordered pairs); what a rank fills in step t it
// fills again in step t + 2, hence two of most things, chosen by parity.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "transport/board.h"

namespace pydist {

// One rank's call of one parity: what it calls, and the data where that is small.
struct alignas(kCacheLineNbytes) CallLine {
  static constexpr size_t kInlineNbytes = 48;
  std::atomic<uint64_t> sequence;  // of the call, from 1; the release that publishes the rest
  uint64_t call;                   // Call::pack()
  uint8_t data[kInlineNbytes];
};
static_assert(sizeof(CallLine) == kCacheLineNbytes);

// Single-writer flags of one rank. Filled, combined and done only ever grow, over all operations.
struct RankFlags {
  Counter filled;    // staged steps whose staging slot is full
  Counter combined;  // staged steps that this rank has combined
  Counter finished;  // sequence of the last call whose reads of peers' memory are over
  Counter done;      // chunks reduced
  Counter busy;      // 1 while this rank may write into peers' memory
};

class PayloadLayout {
 public:
  // Data up to this size travels through the eager area: one synchronisation, and every rank
  // reduces all of it. Measured with 2 ranks on an AMD EPYC (Zen 4): from 8 KiB on, sharing the
  // work costs less than it saves in synchronisation.
  static constexpr size_t kEagerNbytes = size_t{4} << 10;
  // Large enough that a step's three synchronisations do not show, small enough that they overlap
  // in tensors of 1 MiB.
  static constexpr size_t kSlotNbytes = size_t{256} << 10;
  static constexpr size_t kMinRingNbytes = size_t{4} << 10;
  static constexpr size_t kMaxRingNbytes = size_t{256} << 10;
  static constexpr size_t kAllRingsNbytes = size_t{4} << 20;
  static constexpr size_t kRingControlNbytes = 4 * kCacheLineNbytes;

  explicit PayloadLayout(int size) : size_(static_cast<size_t>(size)) {
    // Whole cache lines; a slot holds one slice for every rank.
    slice_nbytes_ = std::max(kSlotNbytes / size_ / kCacheLineNbytes, size_t{1}) * kCacheLineNbytes;
    ring_nbytes_ = std::clamp(kAllRingsNbytes / (size_ * size_), kMinRingNbytes, kMaxRingNbytes);
    ring_nbytes_ = ring_nbytes_ / kCacheLineNbytes * kCacheLineNbytes;
    size_t end = 0;
    claims_ = advance(end, size_ * sizeof(Counter));
    calls_ = advance(end, 2 * size_ * sizeof(CallLine));
    flags_ = advance(end, size_ * sizeof(RankFlags));
    splits_ = advance(end, 2 * size_ * splits_nbytes());
    eager_ = advance(end, 2 * size_ * kEagerNbytes);
    staging_ = advance(end, 2 * size_ * slot_nbytes());
    results_ = advance(end, 2 * size_ * slice_nbytes_);
    rings_ = advance(end, size_ * size_ * (kRingControlNbytes + ring_nbytes_));
    total_nbytes_ = end;
  }

  size_t claim(int rank) const { return claims_ + static_cast<size_t>(rank) * sizeof(Counter); }
  size_t call(uint64_t parity, int rank) const {
    return calls_ + entry(parity, rank) * sizeof(CallLine);
  }
  size_t flags(int rank) const { return flags_ + static_cast<size_t>(rank) * sizeof(RankFlags); }
  // int64 input_splits[size], output_splits[size]
  size_t splits(uint64_t parity, int rank) const {
    return splits_ + entry(parity, rank) * splits_nbytes();
  }
  size_t eager(uint64_t parity, int rank) const {
    return eager_ + entry(parity, rank) * kEagerNbytes;
  }
  size_t slot(uint64_t parity, int rank) const {
    return staging_ + entry(parity, rank) * slot_nbytes();
  }
  size_t result(uint64_t parity, int rank) const {
    return results_ + entry(parity, rank) * slice_nbytes_;
  }
  // The ring that `from` writes and `to` reads: its control lines, then ring_nbytes().
  size_t ring(int from, int to) const {
    const size_t pair = static_cast<size_t>(from) * size_ + static_cast<size_t>(to);
    return rings_ + pair * (kRingControlNbytes + ring_nbytes_);
  }

  size_t slice_nbytes() const { return slice_nbytes_; }
  size_t slot_nbytes() const { return slice_nbytes_ * size_; }
  size_t ring_nbytes() const { return ring_nbytes_; }
  size_t total_nbytes() const { return total_nbytes_; }

 private:
  size_t entry(uint64_t parity, int rank) const {
    return (parity & 1) * size_ + static_cast<size_t>(rank);
  }
  size_t splits_nbytes() const {
    const size_t nbytes = 2 * size_ * sizeof(int64_t);
    return (nbytes + kCacheLineNbytes - 1) / kCacheLineNbytes * kCacheLineNbytes;
  }
  static size_t advance(size_t& end, size_t nbytes) {
    const size_t begin = end;
    end += nbytes;
    return begin;
  }

  size_t size_, slice_nbytes_, ring_nbytes_;
  size_t claims_, calls_, flags_, splits_, eager_, staging_, results_, rings_, total_nbytes_;
};

}  // namespace pydist
