#include "collective/shm_communicator.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/clock.h"
#include "collective/call_rules.h"
#include "transport/arena.h"

namespace pydist {

namespace {

constexpr double kQuietLimit_s = 10;  // far longer than any chunk takes, unless a peer is stopped

// What a kBroadcastMany line carries, compared between ranks.
struct ManyLayout {
  uint64_t num_buffers;
  uint64_t hash;
  bool operator==(const ManyLayout& other) const {
    return num_buffers == other.num_buffers && hash == other.hash;
  }
};

ManyLayout many_layout_of(const CallLine& line) {
  ManyLayout layout;
  std::memcpy(&layout, line.data, sizeof(layout));
  return layout;
}

// The buffer that peers must reach for the direct way.
const Buffer& shared_buffer(const Collective& collective) {
  return works_in_place(collective.operation) ? collective.output : collective.input;
}

bool lies_in_arena(const Buffer& buffer) {
  const Arena* arena = Arena::if_exists();
  return arena != nullptr && buffer.num_elements > 0 && arena->contains(buffer.data) &&
         arena->contains(buffer.bytes() + buffer.nbytes() - 1);
}

}  // namespace

std::shared_ptr<ShmCommunicator> ShmCommunicator::create(Store& store, BoardOptions options) {
  PYDIST_CHECK(options.size <= Call::kMaxRanks, UsageError, options.name, " has ", options.size,
               " ranks; at most ", Call::kMaxRanks, " can share a host's memory");
  const PayloadLayout layout(options.size);
  options.payload_nbytes = layout.total_nbytes();
  return std::shared_ptr<ShmCommunicator>(
      new ShmCommunicator(Board::create(store, options), layout));
}

ShmCommunicator::ShmCommunicator(std::shared_ptr<Board> board, const PayloadLayout& layout)
    : board_(std::move(board)),
      layout_(layout),
      rank_(board_->rank()),
      size_(board_->size()),
      messages_(std::make_shared<PointToPoint>(board_, layout_)),
      inputs_(size_),
      outputs_(size_),
      queue_(board_) {}

ShmCommunicator::~ShmCommunicator() { messages_->close(); }

void ShmCommunicator::run(const Collective& collective) {
  board_->check_process();
  queue_.run([&] { execute(collective); });
}

std::shared_ptr<Request> ShmCommunicator::start(Collective collective,
                                                std::shared_ptr<void> keep_alive) {
  std::string description = call_of(collective).describe();
  return queue_.start([this, collective = std::move(collective),
                       keep_alive = std::move(keep_alive)] { execute(collective); },
                      std::move(description));
}

void ShmCommunicator::execute(const Collective& collective) {
  Call call = call_of(collective);
  call.in_arena = lies_in_arena(shared_buffer(collective));
  carry_out(collective, call);
  counters_.add(collective);
}

void ShmCommunicator::carry_out(const Collective& collective, const Call& call) {
  board_->check([&] { return call.describe(); });
  const std::string reason = why_invalid(collective, rank_, size_);
  ++sequence_;
  if (!reason.empty()) refuse(call, reason);
  if (size_ == 1) return execute_alone(collective);
  const size_t eager = eager_nbytes(call);
  if (eager > 0) {
    fill_eager(collective, eager);
  } else if (call.in_arena) {
    const uint64_t offset = Arena::if_exists()->offset_of(shared_buffer(collective).data);
    std::memcpy(line(rank_).data, &offset, sizeof(offset));
  }
  if (call.operation == Operation::kAllToAll) publish_splits(collective);
  if (call.operation == Operation::kBroadcastMany) {
    const ManyLayout layout{collective.buffers.size(), layout_hash(collective.buffers)};
    std::memcpy(line(rank_).data, &layout, sizeof(layout));
  }
  agree(call);
  if (eager > 0) return transfer_eager(collective, eager);
  if (call.operation == Operation::kAllToAll) check_splits();
  try {
    transfer(collective, call);
  } catch (...) {
    board_->fail(board_->describe(rank_) + " failed in " + call.describe());
    wait_until_nobody_writes(collective);
    throw;
  }
}

void ShmCommunicator::transfer(const Collective& collective, const Call& call) {
  if (call.operation == Operation::kBarrier) return;
  if (call.num_elements == 0 && call.operation != Operation::kAllToAll) return;
  if (!transfer_direct(collective, call)) transfer_staged(collective, call);
}

// A group of one: what it would get from others it gets from itself.
void ShmCommunicator::execute_alone(const Collective& collective) {
  const Buffer& input = collective.input;
  if (input.num_elements > 0) {
    std::memmove(collective.output.data, input.data, input.nbytes());
  }
}

// Peers wait for a call of this rank: they learn that it is invalid, and why.
void ShmCommunicator::refuse(const Call& call, const std::string& reason) {
  if (size_ > 1) {
    Call invalid;
    uint8_t* text = line(rank_).data;
    std::memset(text, 0, CallLine::kInlineNbytes);
    std::memcpy(text, reason.data(), std::min(reason.size(), CallLine::kInlineNbytes - 1));
    try {
      agree(invalid);
    } catch (const MismatchError&) {  // certain, and less helpful than our own error
    }
  }
  if (call.operation == Operation::kInvalid) throw UsageError(reason);
  throw UsageError(concat(call.describe(), ": ", reason));
}

// Publishes this rank's call, waits for everybody's and compares.
//
// A line of this parity is written again at sequence + 2, which this rank reaches after all have
// published sequence + 1, so after all have read this one. The same holds for the eager areas and
// the splits.
void ShmCommunicator::agree(const Call& call) {
  CallLine& mine = line(rank_);
  mine.call = call.pack();
  publish(mine.sequence, sequence_);
  board_->wait(
      [this] {
        for (int r = 0; r < size_; ++r) {
          if (line(r).sequence.load(std::memory_order_acquire) < sequence_) return r;
        }
        return Board::kNobody;
      },
      [&] { return call.describe(); });
  const ManyLayout layout = many_layout_of(mine);
  bool equal = true;
  for (int r = 0; r < size_; ++r) {
    equal &= ((line(r).call ^ mine.call) & ~Call::kInArenaBit) == 0;
    if (call.operation == Operation::kBroadcastMany) equal &= many_layout_of(line(r)) == layout;
  }
  if (!equal) raise_mismatch();
}

std::string ShmCommunicator::describe_call_of(int r) const {
  const CallLine& theirs = line(r);
  const Call call = Call::unpack(theirs.call);
  if (call.operation == Operation::kInvalid) {
    return concat("made an invalid call (", reinterpret_cast<const char*>(theirs.data), ")");
  }
  if (call.operation == Operation::kBroadcastMany) {
    const ManyLayout layout = many_layout_of(theirs);
    return concat("called ", call.describe(), " in ", layout.num_buffers, " pieces, layout ",
                  std::hex, layout.hash);
  }
  return concat("called ", call.describe());
}

void ShmCommunicator::raise_mismatch() {
  std::string text;
  for (int r = 0; r < size_; ++r) {
    text += concat(r > 0 ? "; " : "", board_->describe(r), " ", describe_call_of(r));
  }
  throw MismatchError(concat("ranks disagree about collective number ", sequence_, " of ",
                             board_->name(), ": ", text, ". This is rank ", rank_,
                             ". Make every rank call the same operations in the same order, with "
                             "the same sizes and dtypes"));
}

void ShmCommunicator::publish_splits(const Collective& collective) {
  std::copy(collective.input_splits.begin(), collective.input_splits.end(), splits(rank_));
  std::copy(collective.output_splits.begin(), collective.output_splits.end(),
            splits(rank_) + size_);
}

// Every rank checks all pairs, so all raise.
void ShmCommunicator::check_splits() {
  for (int from = 0; from < size_; ++from) {
    for (int to = 0; to < size_; ++to) {
      const int64_t sent = splits(from)[to], expected = splits(to)[size_ + from];
      PYDIST_CHECK(sent == expected, MismatchError, "all_to_all, collective number ", sequence_,
                   " of ", board_->name(), ": ", board_->describe(from), " sends ", sent,
                   " elements to ", board_->describe(to), ", which expects ", expected,
                   "; make input_split_sizes and output_split_sizes of the two agree");
    }
  }
}

bool ShmCommunicator::all_in_arena() const {
  for (int r = 0; r < size_; ++r) {
    if ((line(r).call & Call::kInArenaBit) == 0) return false;
  }
  return true;
}

// Where this process sees the buffer that rank r published.
uint8_t* ShmCommunicator::peer_memory(int r) const {
  uint64_t offset;
  std::memcpy(&offset, line(r).data, sizeof(offset));
  return board_->arena_base(r) + offset;
}

void ShmCommunicator::await(Counter RankFlags::* flag, uint64_t value, const Call& call, int only) {
  board_->wait(
      [&] {
        for (int r = 0; r < size_; ++r) {
          if (only != Board::kAnybody && r != only) continue;
          if ((flags(r).*flag).value.load(std::memory_order_acquire) < value) return r;
        }
        return Board::kNobody;
      },
      [&] { return call.describe(); });
}

// Nobody may change what it lent to its peers before they have read it.
void ShmCommunicator::finish_reading(const Call& call) {
  publish(flags(rank_).finished.value, sequence_);
  await(&RankFlags::finished, sequence_, call);
}

// The group has failed. The caller may free its memory as soon as we return, so no peer may be
// inside a chunk any more; none begins one, see claim_chunk(). A peer that stays in it (it is
// stopped) leaves us no choice but to never reuse the block.
void ShmCommunicator::wait_until_nobody_writes(const Collective& collective) noexcept {
  const double deadline_s = monotonic_s() + kQuietLimit_s;
  for (int r = 0; r < size_; ++r) {
    // seq_cst: pairs with the store before the test of failed() in reduce_direct().
    while (flags(r).busy.value.load(std::memory_order_seq_cst) != 0 && board_->may_still_write(r)) {
      if (monotonic_s() > deadline_s) {
        void* block = collective.output.block;
        if (block != nullptr && Arena::if_exists()->is_block(block)) Arena::if_exists()->pin(block);
        return;
      }
      ::usleep(100);
    }
  }
}

void ShmCommunicator::send(const Buffer& buffer, int destination, int64_t tag) {
  check_destination(destination);
  messages_->send(buffer, destination, tag);
}

int ShmCommunicator::receive(const Buffer& buffer, int source, int64_t tag) {
  check_source(source);
  return messages_->receive(buffer, source, tag);
}

std::shared_ptr<Request> ShmCommunicator::start_send(const Buffer& buffer, int destination,
                                                     int64_t tag,
                                                     std::shared_ptr<void> keep_alive) {
  check_destination(destination);
  return messages_->start_send(buffer, destination, tag, std::move(keep_alive));
}

std::shared_ptr<Request> ShmCommunicator::start_receive(const Buffer& buffer, int source,
                                                        int64_t tag,
                                                        std::shared_ptr<void> keep_alive) {
  check_source(source);
  return messages_->start_receive(buffer, source, tag, std::move(keep_alive));
}

void ShmCommunicator::check_destination(int destination) const {
  PYDIST_CHECK(destination >= 0 && destination < size_ && destination != rank_, UsageError,
               "send from rank ", rank_, " to rank ", destination, " of ", size_,
               "; the destination must be another rank of the group");
}

void ShmCommunicator::check_source(int source) const {
  const bool any = source == kAnySource && size_ > 1;
  PYDIST_CHECK(any || (source >= 0 && source < size_ && source != rank_), UsageError,
               "recv on rank ", rank_, " from rank ", source, " of ", size_,
               "; the source must be another rank of the group");
}

CommunicatorCounts ShmCommunicator::counts() const {
  CommunicatorCounts counts;
  counters_.read(counts);
  counts.sent = messages_->sent().read();
  counts.received = messages_->received().read();
  return counts;
}

}  // namespace pydist
