// The round over shared memory: whoever is idle reduces, in place, in all ranks' arenas. No torch.
//
// Every rank publishes its units on the group's board, as offsets into its own arena. Once all
// ranks have published a unit, any rank may claim one of its chunks, read it from every rank's
// arena, add in rank order, and write the mean back to all.
//
//   slot[r][u]   {published, offset}  writer r       offset, then published = round (release)
//   claim[u]     round << 20 | next   CAS by anyone  a word of an older round counts as next = 0:
//   nothing is ever reset done[r][u]   chunks               writer r       cumulative; the sum over
//   r is compared with a running total ended[r]     round                writer r record[r][round &
//   1], then ended = round (release) busy[r]      0 or 1               writer r       1 while r may
//   touch other ranks' memory
//
// A rank touches a peer's block only between a claim of that block's round and the matching `done`.
// The owner reuses a block only after all chunks are done, or after the board has failed and nobody
// is busy: `busy` and the board's failure word form a store-load pair on both sides, hence seq_cst.
// Each chunk is summed once, in rank order, by the same kernel, from inputs that no longer change,
// so who does it, and when, cannot change a bit.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "bucket/arena_units.h"
#include "bucket/round.h"
#include "transport/board.h"
#include "transport/store.h"

namespace pydist {

class SharedRound final : public Round {
 public:
  // Collective. Raises HostError where the ranks cannot share memory.
  static std::unique_ptr<SharedRound> create(Store& store, BoardOptions board_options,
                                             RoundOptions options);
  ~SharedRound() override;

  int rank() const override { return board_->rank(); }
  int size() const override { return board_->size(); }
  std::string describe(int rank) const override { return board_->describe(rank); }
  void* unit_memory(int unit) override { return memory_.memory(unit); }
  std::shared_ptr<void> hold_memory(int unit) override { return memory_.hold(unit); }
  bool reaches(const void* data) const override;
  void pin(void* data) override;
  void unpin(void* data) noexcept override;
  bool publishes_all() const override { return false; }
  void begin(int divisor) override;
  void publish(int unit, void* data) override;
  void progress() override;
  const std::vector<RoundRecord>& end(const RoundRecord& mine) override;
  void finish() override;
  void check() override;
  void fail(const std::string& reason) noexcept override { board_->fail(reason); }
  bool drain() noexcept override;

 private:
  struct alignas(kCacheLineNbytes) Slot {
    std::atomic<uint64_t> published;  // release: `offset` is valid for this round
    uint64_t offset;
  };
  struct alignas(kCacheLineNbytes) Claim {
    std::atomic<uint64_t> word;
  };
  SharedRound(std::shared_ptr<Board> board, RoundOptions options);
  static size_t payload_nbytes(int size, const RoundOptions& options);
  static size_t record_words(int num_parameters);
  int first_unpublished(int unit) const;
  bool work(int unit);
  void reduce_chunk(int unit, uint64_t chunk);
  uint64_t num_chunks(int unit) const;
  uint64_t done_chunks(int unit) const;
  void work_on_open_units(size_t limit);
  void read_records();
  Slot& slot(int r, int unit) const { return slots_[r * num_units_ + unit]; }
  Counter& done(int r, int unit) const { return done_[r * num_units_ + unit]; }
  uint64_t* record(int r) const;
  std::string operation(const char* doing, int unit) const;

  std::shared_ptr<Board> board_;
  RoundOptions options_;
  int num_units_;
  uint64_t round_ = 0;
  int divisor_ = 0;
  int64_t work_ns_ = 0;  // of this thread on chunks, in this round
  Slot* slots_;
  Claim* claims_;
  Counter* done_;
  Counter* ended_;
  Counter* busy_;
  uint64_t* record_data_;
  ArenaUnits memory_;
  std::vector<int> published_;          // of this round
  std::vector<int> open_;               // published, chunks may be left to claim
  std::vector<uint64_t> total_chunks_;  // per unit: done after its last round
  std::vector<RoundRecord> records_;
};

}  // namespace pydist
