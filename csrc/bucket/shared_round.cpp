#include "bucket/shared_round.h"

#include <sched.h>

#include <algorithm>

#include "base/check.h"
#include "base/clock.h"
#include "base/fork.h"
#include "collective/reduce.h"
#include "transport/arena.h"

namespace pydist {

namespace {

// Small enough to share the work and stay in a core's own cache with all its copies, large enough
// that a claim costs nothing.
constexpr size_t kChunkNbytes = size_t{64} << 10;
constexpr int kRoundShift = 20;
constexpr uint64_t kNextMask = (uint64_t{1} << kRoundShift) - 1;
// How many open units one progress() looks at: hooks are frequent, and old units come first.
constexpr size_t kProgressUnits = 8;
constexpr double kDrain_s = 10;
constexpr int kMaxRanks = 256;

}  // namespace

size_t SharedRound::record_words(int num_parameters) {
  return RoundRecord(num_parameters).num_words();
}

size_t SharedRound::payload_nbytes(int size, const RoundOptions& options) {
  const size_t units = options.units.size();
  const size_t lines = size * units * 2 + units + 2 * static_cast<size_t>(size);
  return lines * kCacheLineNbytes +
         2 * size * record_words(options.num_parameters) * sizeof(uint64_t);
}

std::unique_ptr<SharedRound> SharedRound::create(Store& store, BoardOptions board_options,
                                                 RoundOptions options) {
  PYDIST_CHECK(board_options.size <= kMaxRanks, UsageError, "at most ", kMaxRanks,
               " ranks can share memory, but the group has ", board_options.size);
  for (size_t u = 0; u < options.units.size(); ++u) {
    PYDIST_CHECK(options.units[u].nbytes() / kChunkNbytes < kNextMask, UsageError,
                 options.unit_names[u], " is too large to be reduced");
  }
  board_options.payload_nbytes = payload_nbytes(board_options.size, options);
  board_options.timeout_s = options.timeout_s;
  auto board = Board::create(store, board_options);
  return std::unique_ptr<SharedRound>(new SharedRound(std::move(board), std::move(options)));
}

SharedRound::SharedRound(std::shared_ptr<Board> board, RoundOptions options)
    : board_(std::move(board)),
      options_(std::move(options)),
      num_units_(static_cast<int>(options_.units.size())),
      memory_(options_.units),
      total_chunks_(num_units_, 0),
      records_(size(), RoundRecord(options_.num_parameters)) {
  slots_ = reinterpret_cast<Slot*>(board_->payload());
  claims_ = reinterpret_cast<Claim*>(slots_ + size() * num_units_);
  done_ = reinterpret_cast<Counter*>(claims_ + num_units_);
  ended_ = done_ + size() * num_units_;
  busy_ = ended_ + size();
  record_data_ = reinterpret_cast<uint64_t*>(busy_ + size());
}

SharedRound::~SharedRound() {
  // In a failed group a peer might still write; blocks it may touch are then given up for good.
  if (in_forked_child() || (board_->failed() && !drain())) return;
  memory_.give_back();
}

bool SharedRound::reaches(const void* data) const {
  return size() > 1 && Arena::instance().is_block(data);
}

void SharedRound::pin(void* data) { Arena::instance().pin(data); }

void SharedRound::unpin(void* data) noexcept { Arena::instance().unpin(data); }

void SharedRound::begin(int divisor) {
  check();
  ++round_;
  work_ns_ = 0;
  divisor_ = divisor;
  published_.clear();
  open_.clear();
}

void SharedRound::publish(int unit, void* data) {
  Slot& mine = slot(rank(), unit);
  mine.offset = Arena::instance().offset_of(data);
  mine.published.store(round_, std::memory_order_release);  // pairs with first_unpublished()
  published_.push_back(unit);
  open_.push_back(unit);
  board_->ring();
}

int SharedRound::first_unpublished(int unit) const {
  for (int r = 0; r < size(); ++r) {
    if (slot(r, unit).published.load(std::memory_order_acquire) != round_) return r;
  }
  return Board::kNobody;
}

uint64_t SharedRound::num_chunks(int unit) const {
  return (options_.units[unit].nbytes() + kChunkNbytes - 1) / kChunkNbytes;
}

uint64_t SharedRound::done_chunks(int unit) const {
  uint64_t sum = 0;
  for (int r = 0; r < size(); ++r) sum += done(r, unit).value.load(std::memory_order_acquire);
  return sum;
}

// Reduces chunks until none is left to claim; true if all have been claimed.
bool SharedRound::work(int unit) {
  if (first_unpublished(unit) != Board::kNobody) return false;
  std::atomic<uint64_t>& busy = busy_[rank()].value;
  int64_t start_ns = 0;  // of the first chunk
  for (;;) {
    busy.store(1, std::memory_order_seq_cst);
    const bool failed = board_->failed();
    uint64_t word = claims_[unit].word.load(std::memory_order_relaxed);
    const uint64_t next = word >> kRoundShift == round_ ? word & kNextMask : 0;
    const bool all_claimed = next >= num_chunks(unit) || word >> kRoundShift > round_;
    if (failed || all_claimed) busy.store(0, std::memory_order_release);
    // A peer that is through may fail before we are: what it leaves to us is only to see that.
    if (all_claimed) break;
    if (failed) check();
    if (!claims_[unit].word.compare_exchange_strong(word, round_ << kRoundShift | (next + 1),
                                                    std::memory_order_acq_rel)) {
      continue;
    }
    if (start_ns == 0) start_ns = monotonic_ns();
    if (options_.on_chunk != nullptr) options_.on_chunk();
    reduce_chunk(unit, next);
    std::atomic<uint64_t>& mine = done(rank(), unit).value;
    mine.store(mine.load(std::memory_order_relaxed) + 1, std::memory_order_release);
    busy.store(0, std::memory_order_release);
  }
  if (start_ns == 0) return true;
  work_ns_ += monotonic_ns() - start_ns;
  board_->ring();
  return true;
}

// Offsets are read only here, after the claim: before it a slot might still be rewritten for a
// later round.
void SharedRound::reduce_chunk(int unit, uint64_t chunk) {
  const Unit& what = options_.units[unit];
  const size_t element_nbytes = dtype_nbytes(what.dtype);
  const int64_t per_chunk = static_cast<int64_t>(kChunkNbytes / element_nbytes);
  const int64_t begin = static_cast<int64_t>(chunk) * per_chunk;
  void* copies[kMaxRanks];
  for (int r = 0; r < size(); ++r) {
    copies[r] = board_->arena_base(r) + slot(r, unit).offset + begin * element_nbytes;
  }
  const ReduceArgs args{
      copies, size(), copies, size(), std::min(per_chunk, what.num_elements - begin), divisor_};
  reduce(what.dtype, ReduceOp::kMean, args, board_->isa());
}

void SharedRound::work_on_open_units(size_t limit) {
  limit = std::min(limit, open_.size());
  size_t kept = 0;
  for (size_t i = 0; i < limit; ++i) {
    if (!work(open_[i])) open_[kept++] = open_[i];
  }
  open_.erase(open_.begin() + kept, open_.begin() + limit);
}

void SharedRound::progress() { work_on_open_units(kProgressUnits); }

uint64_t* SharedRound::record(int r) const {
  const size_t words = record_words(options_.num_parameters);
  return record_data_ + (2 * r + (round_ & 1)) * words;
}

// A record of this parity is rewritten two rounds later, which its writer cannot reach before we
// have ended the next one.
void SharedRound::read_records() {
  for (int r = 0; r < size(); ++r) records_[r].read(record(r));
}

const std::vector<RoundRecord>& SharedRound::end(const RoundRecord& mine) {
  hidden_ns_ += work_ns_;
  mine.write(record(rank()));
  ended_[rank()].value.store(round_, std::memory_order_release);  // pairs with the loads below
  board_->ring();
  const double start_s = monotonic_s();
  board_->wait(
      [this] {
        // First this: where all have ended, all go on to compare their records, even if one has
        // failed since.
        for (int r = 0; r < size(); ++r) {
          if (ended_[r].value.load(std::memory_order_acquire) >= round_) continue;
          work_on_open_units(open_.size());
          return r;
        }
        return Board::kNobody;
      },
      [this] { return operation("waiting for every rank to end backward", -1); });
  wait_s_ += monotonic_s() - start_s;
  read_records();
  return records_;
}

void SharedRound::finish() {
  const double start_s = monotonic_s();
  for (const int unit : published_) {
    total_chunks_[unit] += num_chunks(unit);
    board_->wait(
        [this, unit] {
          work_on_open_units(open_.size());
          // First this: a peer that is through may have published the unit for the next round
          // already.
          if (done_chunks(unit) >= total_chunks_[unit]) return Board::kNobody;
          const int missing = first_unpublished(unit);
          return missing == Board::kNobody ? Board::kAnybody : missing;
        },
        [this, unit] { return operation("reducing", unit); });
    moved_nbytes_ += options_.units[unit].nbytes();
  }
  wait_s_ += monotonic_s() - start_s;
}

void SharedRound::check() {
  board_->check([this] { return operation("backward", -1); });
}

std::string SharedRound::operation(const char* doing, int unit) const {
  std::string text = concat("round ", round_, " of gradient reduction, ", doing);
  if (unit >= 0) text += " " + options_.unit_names[unit];
  return text;
}

bool SharedRound::drain() noexcept {
  if (in_forked_child()) return false;  // the flags are not mapped here
  busy_[rank()].value.store(0, std::memory_order_seq_cst);
  const double deadline_s = monotonic_s() + kDrain_s;
  for (int r = 0; r < size(); ++r) {
    while (r != rank() && busy_[r].value.load(std::memory_order_seq_cst) != 0 &&
           board_->may_still_write(r)) {
      if (monotonic_s() > deadline_s) return false;
      ::sched_yield();
    }
  }
  return true;
}

}  // namespace pydist
