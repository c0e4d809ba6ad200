// The direct way: peers read, and for all_reduce write, each other's arenas in place.
//
// all_reduce: the buffers are cut into chunks, the same on all ranks, and every rank gets an equal
// run of them. A rank claims its own chunks first (they may be in its cache from last time, and
// nobody else touches its claim word), then those of others that are late:
//
//   claim[r] (sequence << 20 | chunks of run r that are claimed), advanced by compare-and-exchange;
//   the word of an older call
//           counts as none
//   rank    busy = 1; if the group has failed: busy = 0, raise
//           claim a chunk, else busy = 0, stop
//           reduce it in rank order from all copies into all copies; ++done; busy = 0
//           wait until the sum of all done equals all chunks so far
//
// Busy and failed are a store-load pair on both sides (seq_cst): either a claimant sees the
// failure, or the failing rank sees that it is busy and waits before its memory can be freed. Who
// reduces a chunk does not change its bits.
//
// The other operations only read: each rank fills its own output, then waits until nobody reads its
// input any more.
#include <algorithm>
#include <cstring>

#include "collective/shm_communicator.h"

namespace pydist {

namespace {

// Small enough that ranks finish together, large enough that claiming costs nothing (about 0.1 us
// per chunk).
constexpr size_t kMaxChunkNbytes = size_t{128} << 10;
constexpr size_t kMinChunkNbytes = size_t{32} << 10;
constexpr int kChunksPerRank = 4;
constexpr int kChunkBits = 20;
constexpr int64_t kMaxChunks = (int64_t{1} << kChunkBits) - 1;

int64_t chunk_elements(const Buffer& buffer, int size) {
  const size_t even_nbytes = buffer.nbytes() / static_cast<size_t>(size * kChunksPerRank);
  const size_t nbytes = std::max(std::clamp(even_nbytes, kMinChunkNbytes, kMaxChunkNbytes),
                                 buffer.nbytes() / kMaxChunks + 1);
  const size_t aligned = (nbytes + kCacheLineNbytes - 1) / kCacheLineNbytes * kCacheLineNbytes;
  return static_cast<int64_t>(aligned / dtype_nbytes(buffer.dtype));
}

void copy(uint8_t* to, const uint8_t* from, size_t nbytes) {
  if (to != from && nbytes > 0) std::memcpy(to, from, nbytes);
}

}  // namespace

// False where the memory is not in arenas.
bool ShmCommunicator::transfer_direct(const Collective& collective, const Call& call) {
  if (call.operation == Operation::kBroadcastMany) return false;
  const bool one_source =
      call.operation == Operation::kBroadcast || call.operation == Operation::kScatter;
  const bool readable =
      one_source ? (line(call.root).call & Call::kInArenaBit) != 0 : all_in_arena();
  if (!readable) return false;
  const Buffer& output = collective.output;
  switch (call.operation) {
    case Operation::kAllReduce:
    case Operation::kReduce:
      reduce_direct(collective, call);
      return true;
    case Operation::kReduceScatter:
      for (int r = 0; r < size_; ++r) inputs_[r] = peer_memory(r) + rank_ * output.nbytes();
      outputs_[0] = output.data;
      reduce(output.dtype, collective.op,
             {inputs_.data(), size_, outputs_.data(), 1, output.num_elements}, board_->isa());
      break;
    case Operation::kGather:
      if (rank_ != call.root) break;
      [[fallthrough]];
    case Operation::kAllGather:
      // Each begins with itself, so that not all read from the same rank at the same time.
      for (int k = 0; k < size_; ++k) {
        const int r = (rank_ + k) % size_;
        const size_t nbytes = collective.input.nbytes();
        copy(output.bytes() + r * nbytes, r == rank_ ? collective.input.bytes() : peer_memory(r),
             nbytes);
      }
      break;
    case Operation::kBroadcast:
      if (rank_ != call.root) copy(output.bytes(), peer_memory(call.root), output.nbytes());
      break;
    case Operation::kScatter: {
      const uint8_t* from = rank_ == call.root ? collective.input.bytes() : peer_memory(call.root);
      copy(output.bytes(), from + rank_ * output.nbytes(), output.nbytes());
      break;
    }
    case Operation::kAllToAll:
      all_to_all_direct(collective);
      break;
    default:
      return false;
  }
  finish_reading(call);
  return true;
}

void ShmCommunicator::all_to_all_direct(const Collective& collective) {
  const size_t element_nbytes = dtype_nbytes(collective.output.dtype);
  uint8_t* to = collective.output.bytes();
  for (int r = 0; r < size_; ++r) {
    int64_t before = 0;
    for (int q = 0; q < rank_; ++q) before += splits(r)[q];
    const size_t nbytes = static_cast<size_t>(splits(r)[rank_]) * element_nbytes;
    copy(to, peer_memory(r) + static_cast<size_t>(before) * element_nbytes, nbytes);
    to += nbytes;
  }
}

void ShmCommunicator::reduce_direct(const Collective& collective, const Call& call) {
  const int64_t chunk = chunk_elements(collective.output, size_);
  const int64_t num_chunks = (call.num_elements + chunk - 1) / chunk;
  chunks_ += static_cast<uint64_t>(num_chunks);
  RankFlags& mine = flags(rank_);
  uint64_t done = mine.done.value.load(std::memory_order_relaxed);
  for (;;) {
    mine.busy.value.store(1, std::memory_order_seq_cst);
    const bool failed = board_->failed();
    const int64_t index = failed ? -1 : claim_chunk(num_chunks);
    if (index >= 0) {
      const int64_t begin = index * chunk;
      reduce_chunk(collective, begin, std::min(chunk, call.num_elements - begin));
      // Release: the chunk's bytes come before it counts as done.
      mine.done.value.store(++done, std::memory_order_release);
    }
    mine.busy.value.store(0, std::memory_order_release);
    if (failed) board_->check([&] { return call.describe(); });
    if (index < 0) break;
  }
  board_->ring();
  board_->wait(
      [this] {
        uint64_t total = 0;
        int missing = Board::kAnybody;
        for (int r = 0; r < size_; ++r) {
          total += flags(r).done.value.load(std::memory_order_acquire);
          if (flags(r).busy.value.load(std::memory_order_relaxed) != 0) missing = r;
        }
        return total == chunks_ ? Board::kNobody : missing;
      },
      [&] { return call.describe(); });
}

// A chunk that nobody has claimed, or -1.
int64_t ShmCommunicator::claim_chunk(int64_t num_chunks) {
  for (int k = 0; k < size_; ++k) {
    const int r = (rank_ + k) % size_;
    const int64_t begin = num_chunks * r / size_, end = num_chunks * (r + 1) / size_;
    const int64_t index = claim_of_run(r, end - begin);
    if (index >= 0) return begin + index;
  }
  return -1;
}

int64_t ShmCommunicator::claim_of_run(int r, int64_t num_chunks) {
  auto& word = reinterpret_cast<Counter*>(board_->payload() + layout_.claim(r))->value;
  uint64_t seen = word.load(std::memory_order_relaxed);
  for (;;) {
    const bool current = seen >> kChunkBits == sequence_;
    const int64_t next = current ? static_cast<int64_t>(seen & kMaxChunks) : 0;
    if (next >= num_chunks) return -1;
    const uint64_t claimed = sequence_ << kChunkBits | static_cast<uint64_t>(next + 1);
    // Relaxed: all memory that a chunk needs was published with the calls; what others write there
    // is ordered by done.
    if (word.compare_exchange_weak(seen, claimed, std::memory_order_relaxed)) return next;
  }
}

void ShmCommunicator::reduce_chunk(const Collective& collective, int64_t begin,
                                   int64_t num_elements) {
  const Buffer& buffer = collective.output;
  const size_t offset = static_cast<size_t>(begin) * dtype_nbytes(buffer.dtype);
  for (int r = 0; r < size_; ++r) {
    outputs_[r] = peer_memory(r) + offset;
    inputs_[r] = outputs_[r];
  }
  const bool to_all = collective.operation == Operation::kAllReduce;
  void* const* outputs = to_all ? outputs_.data() : &outputs_[collective.root];
  reduce(buffer.dtype, collective.op,
         {inputs_.data(), size_, outputs, to_all ? size_ : 1, num_elements}, board_->isa());
}

}  // namespace pydist
