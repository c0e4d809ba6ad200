// One backward's worth of reductions: the interface that the reducer drives, one implementation per
// transport.
//
// In every round each rank publishes units as they become ready, in any order; end() agrees on what
// happened in the round; then every rank publishes the units that it still owes, and finish() waits
// until all are reduced, in place, to the mean.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bucket/layout.h"
#include "bucket/pack.h"

namespace pydist {

// A set of small integers, such as parameters; the words are what ranks exchange.
class Bitmap {
 public:
  explicit Bitmap(int size = 0) : words_((size + 63) / 64, 0) {}
  void set(int i) { words_[i / 64] |= uint64_t{1} << (i % 64); }
  bool test(int i) const { return words_[i / 64] >> (i % 64) & 1; }
  // Sets all, and what is left of the last word.
  void fill() { words_.assign(words_.size(), ~uint64_t{0}); }
  void clear() { words_.assign(words_.size(), 0); }
  bool any() const {
    for (const uint64_t word : words_) {
      if (word != 0) return true;
    }
    return false;
  }
  void merge(const Bitmap& other) {
    for (size_t w = 0; w < words_.size(); ++w) words_[w] |= other.words_[w];
  }
  bool operator==(const Bitmap& other) const { return words_ == other.words_; }
  std::vector<uint64_t>& words() { return words_; }
  const std::vector<uint64_t>& words() const { return words_; }

 private:
  std::vector<uint64_t> words_;
};

// What one rank says of its round: a bit per parameter, and a few words.
struct RoundRecord {
  explicit RoundRecord(int num_parameters = 0)
      : used(num_parameters), again(num_parameters), trainable(num_parameters) {}
  Bitmap used;       // got a gradient since the last round
  Bitmap again;      // got another one after its unit was published
  Bitmap trainable;  // requires_grad, as this rank sees it
  // `used` tells of whole backwards: not where a round is a part of one, as when outputs are
  // hidden.
  uint64_t whole = 1;
  uint64_t busy_ns = 0;  // see round_stats.h

  // A rank that takes part in a round of the others has no parameter that is trainable in it.
  bool shadows() const { return !trainable.any(); }

  // The words that ranks exchange.
  size_t num_words() const { return 3 * used.words().size() + 2; }
  void write(uint64_t* out) const {
    for (const Bitmap* bitmap : {&used, &again, &trainable}) {
      out = std::copy(bitmap->words().begin(), bitmap->words().end(), out);
    }
    *out++ = whole;
    *out = busy_ns;
  }
  void read(const uint64_t* in) {
    for (Bitmap* bitmap : {&used, &again, &trainable}) {
      const size_t words = bitmap->words().size();
      std::copy(in, in + words, bitmap->words().begin());
      in += words;
    }
    whole = *in++;
    busy_ns = *in;
  }
};

struct RoundOptions {
  std::vector<Unit> units;
  std::vector<std::string> unit_names;  // for messages
  int num_parameters = 0;
  double timeout_s = 1800;
  std::string remedy;  // after a failure, for messages
  // Called between the claim of a chunk and its reduction; for tests that delay or kill a rank
  // there.
  void (*on_chunk)() = nullptr;
};

class Round {
 public:
  virtual ~Round() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // "rank 1 (pid 1234)".
  virtual std::string describe(int rank) const = 0;

  // Where the unit's elements may be written before publish(): this rank's own memory, 64-byte
  // aligned, made at first use.
  virtual void* unit_memory(int unit) = 0;
  // Keeps the unit's memory in place even when the round is gone.
  virtual std::shared_ptr<void> hold_memory(int unit) = 0;
  // True if peers can reduce a unit where it lies, at `data`.
  virtual bool reaches(const void* data) const = 0;
  // Keeps memory of the caller's, which a unit is reduced in, from being given to anybody else.
  virtual void pin(void*) {}
  virtual void unpin(void*) noexcept {}
  // True if every unit that is not postponed must have been published before end(), by every rank.
  virtual bool publishes_all() const = 0;

  // The mean is the sum divided by `divisor`, which is the same on all ranks; 0: by size().
  virtual void begin(int divisor) = 0;
  // Of a round that publishes all, after begin() and the same on all ranks: this unit will be
  // published after end(), by all ranks in the same order, or not at all.
  // False where the round takes no such promise.
  virtual bool postpone(int) { return false; }
  // After begin(): these units have nobody's gradient in this round, and are not published. The
  // same on all ranks, which ask each other where it has changed. False where the round takes no
  // such promise.
  virtual bool leave_out(const Bitmap&) { return false; }
  // On a device: the current stream has just accumulated a gradient of this unit.
  virtual void accumulated(int) {}
  // The current stream reads the unit's gradients, and writes its memory, from here to publish().
  virtual void open(int) {}
  // Copies between gradients and the unit's memory.
  virtual void copy(int, CopyDirection, const std::vector<PackItem>& items) { pack(items); }
  // Another round of the same backward.
  virtual void begin_second(int divisor) { begin(divisor); }
  // Hands the unit over: nobody but the round may touch `data` until finish() has returned or
  // drain() has.
  virtual void publish(int unit, void* data) = 0;
  // Does what can be done without waiting.
  virtual void progress() = 0;
  // Gives this rank's record and returns every rank's. Waits; raises PeerError and TimeoutError.
  virtual const std::vector<RoundRecord>& end(const RoundRecord& mine) = 0;
  // The same where nobody needs the answer now: it comes from late_records(), and nothing waits.
  // Each rank chooses between the two. False where the round cannot: then end() is to be called.
  virtual bool end_unanswered(const RoundRecord&) { return false; }
  // True if ranks may call end_unanswered().
  virtual bool answers_late() const { return false; }
  // The oldest answer that has come since, once; null if there is none.
  virtual const std::vector<RoundRecord>* late_records() { return nullptr; }
  // False while a graph is captured: then end() is refused.
  virtual bool may_wait() const { return true; }
  // Waits until every published unit holds the mean.
  virtual void finish() = 0;
  // All copies from units are on their way.
  virtual void delivered() {}

  // Raises PeerError if a peer has failed or died.
  virtual void check() = 0;
  // The same, also where it takes a message to know.
  virtual void check_now() { check(); }
  // Tells all ranks that this one gives up, for good. Never throws.
  virtual void fail(const std::string& reason) noexcept = 0;
  // After a failure: waits until no peer touches this rank's memory any more; false if that cannot
  // be known.
  virtual bool drain() noexcept = 0;

  double wait_s() const { return wait_s_; }
  uint64_t moved_nbytes() const { return moved_nbytes_; }
  int64_t hidden_ns() const { return hidden_ns_; }

 protected:
  double wait_s_ = 0;          // spent in end() and finish() since the start
  uint64_t moved_nbytes_ = 0;  // of units reduced since the start
  int64_t hidden_ns_ = 0;      // of communication before calls of end(), while backward went on
};

}  // namespace pydist
