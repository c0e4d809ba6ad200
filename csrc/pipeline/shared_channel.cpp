#include "pipeline/shared_channel.h"

#include <algorithm>
#include <deque>
#include <list>
#include <mutex>

#include "base/fork.h"
#include "collective/message_ring.h"
#include "transport/arena.h"

namespace pydist {

namespace {

// One ordered pair of ranks; the ring follows.
struct LinkControl {
  RingControl ring;
  Counter consumed;  // messages whose payload has been copied; writer: the receiver
  Counter blocked;   // 1 while the sender keeps what the ring has no room for; writer: the sender
};

}  // namespace

class SharedChannel::Layout {
 public:
  static constexpr size_t kMinRingNbytes = size_t{4} << 10;
  static constexpr size_t kMaxRingNbytes = size_t{64} << 10;
  static constexpr size_t kAllRingsNbytes = size_t{4} << 20;

  explicit Layout(const ChannelOptions& options) : size_(static_cast<size_t>(options.size)) {
    ring_nbytes_ = options.ring_nbytes;
    if (ring_nbytes_ == 0) {
      ring_nbytes_ = std::clamp(kAllRingsNbytes / (size_ * size_), kMinRingNbytes, kMaxRingNbytes);
    }
    ring_nbytes_ = (ring_nbytes_ + kCacheLineNbytes - 1) / kCacheLineNbytes * kCacheLineNbytes;
  }

  size_t ring_nbytes() const { return ring_nbytes_; }
  size_t total_nbytes() const { return link(static_cast<int>(size_), 0); }
  size_t link(int from, int to) const {
    const size_t pair = static_cast<size_t>(from) * size_ + static_cast<size_t>(to);
    return size_ * sizeof(FailureRecords) + pair * (sizeof(LinkControl) + ring_nbytes_);
  }

 private:
  size_t size_, ring_nbytes_;
};

// What this rank sends to one destination.
class SharedChannel::Outbox {
 public:
  Outbox(std::shared_ptr<Board> board, const Layout& layout, int destination)
      : board_(std::move(board)),
        destination_(destination),
        control_(reinterpret_cast<LinkControl*>(board_->payload() +
                                                layout.link(board_->rank(), destination))),
        writer_(&control_->ring, reinterpret_cast<uint8_t*>(control_ + 1), layout.ring_nbytes()) {}

  // The payload's block (if any) is lent until the receiver has consumed the message.
  void post(const std::vector<uint8_t>& bytes, ArenaBlocks::Block block) {
    ++num_posted_;
    if (block.data != nullptr) lent_.push_back({num_posted_, block});
    const size_t written = kept_.empty() ? writer_.write(bytes.data(), bytes.size()) : 0;
    if (written < bytes.size()) {
      kept_.emplace_back(bytes.begin() + static_cast<ptrdiff_t>(written), bytes.end());
      // seq_cst, here and in Inbox::made_room(): either the receiver sees this flag after it has
      // made room, or we see the room when we look again.
      control_->blocked.value.store(1, std::memory_order_seq_cst);
    }
    board_->ring(destination_);
  }

  // True once nothing is kept.
  bool hand_over() {
    if (kept_.empty()) return true;
    bool moved = false;
    while (!kept_.empty()) {
      const std::vector<uint8_t>& bytes = kept_.front();
      const size_t written =
          writer_.write(bytes.data() + num_written_, bytes.size() - num_written_);
      moved |= written > 0;
      num_written_ += written;
      if (num_written_ < bytes.size()) break;
      kept_.pop_front();
      num_written_ = 0;
    }
    if (kept_.empty()) control_->blocked.value.store(0, std::memory_order_relaxed);
    if (moved) board_->ring(destination_);
    return kept_.empty();
  }

  void reclaim(ArenaBlocks& blocks) {
    if (lent_.empty()) return;
    // Acquire: pairs with the receiver's release, so that its copies are over.
    const uint64_t consumed = control_->consumed.value.load(std::memory_order_acquire);
    while (!lent_.empty() && lent_.front().message <= consumed) {
      blocks.give_back(lent_.front().block);
      lent_.pop_front();
    }
  }

  bool lends() const { return !lent_.empty(); }
  // A receiver that is gone reads no more.
  bool receiver_is_gone() const { return lends() && !board_->may_still_write(destination_); }
  void give_up(ArenaBlocks& blocks) {
    for (const Lent& lent : lent_) blocks.give_back(lent.block);
    lent_.clear();
  }

 private:
  struct Lent {
    uint64_t message;
    ArenaBlocks::Block block;
  };

  const std::shared_ptr<Board> board_;
  const int destination_;
  LinkControl* const control_;
  RingWriter writer_;
  uint64_t num_posted_ = 0;
  std::deque<Lent> lent_;
  std::deque<std::vector<uint8_t>> kept_;  // for the ring, in this order
  size_t num_written_ = 0;                 // of the first of them
};

// What one source sends to this rank.
class SharedChannel::Inbox {
 public:
  Inbox(const Board& board, const Layout& layout, int source)
      : control_(
            reinterpret_cast<LinkControl*>(board.payload() + layout.link(source, board.rank()))),
        reader_(&control_->ring, reinterpret_cast<uint8_t*>(control_ + 1), layout.ring_nbytes()),
        arena_(board.arena_base(source)) {}

  // Calls arrive(envelope, payload) for each message that is here. True if bytes have moved.
  template <class Arrive>
  bool take_in(Arrive&& arrive) {
    if (reader_.available_nbytes() == 0) return false;
    while (read_on()) {
      const ImageHeader header = this->header();
      const uint8_t* payload = header.payload_offset == ImageHeader::kInline
                                   ? bytes_.data() + header.envelope_nbytes
                                   : arena_ + header.payload_offset;
      num_read_ = 0;
      ++num_consumed_;  // whatever becomes of it
      arrive(bytes_.data(), payload);
      control_->consumed.value.store(num_consumed_, std::memory_order_release);
    }
    return true;
  }

  // Whether the sender waits for the room that has been made.
  bool made_room() const {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    return control_->blocked.value.load(std::memory_order_relaxed) != 0;
  }

 private:
  ImageHeader header() const {
    ImageHeader header;
    std::memcpy(&header, bytes_.data(), sizeof(header));
    return header;
  }

  // True when a whole message is in bytes_.
  bool read_on() {
    if (!read_up_to(sizeof(ImageHeader))) return false;
    const ImageHeader header = this->header();
    const bool is_inline = header.payload_offset == ImageHeader::kInline;
    return read_up_to(header.envelope_nbytes + (is_inline ? header.payload_nbytes : 0));
  }

  bool read_up_to(size_t nbytes) {
    if (bytes_.size() < nbytes) bytes_.resize(nbytes);
    if (num_read_ < nbytes)
      num_read_ += reader_.read(bytes_.data() + num_read_, nbytes - num_read_);
    return num_read_ >= nbytes;
  }

  LinkControl* const control_;
  RingReader reader_;
  const uint8_t* const arena_;  // of the source
  std::vector<uint8_t> bytes_;  // of the message that is arriving
  size_t num_read_ = 0;         // of them
  uint64_t num_consumed_ = 0;
};

// Outboxes of channels that have ended while a receiver might still read what they had lent: their
// blocks return when it has.
class SharedChannel::Retired {
 public:
  static void add(std::vector<std::unique_ptr<Outbox>> outboxes,
                  std::shared_ptr<ArenaBlocks> blocks) {
    const std::lock_guard<std::mutex> lock(mutex());
    for (std::unique_ptr<Outbox>& outbox : outboxes) {
      entries().push_back({blocks, std::move(outbox)});
    }
  }
  static void collect() {
    const std::lock_guard<std::mutex> lock(mutex());
    entries().remove_if([](const Entry& entry) {
      entry.outbox->reclaim(*entry.blocks);
      if (entry.outbox->receiver_is_gone()) entry.outbox->give_up(*entry.blocks);
      return !entry.outbox->lends();
    });
  }

 private:
  struct Entry {
    std::shared_ptr<ArenaBlocks> blocks;
    std::unique_ptr<Outbox> outbox;
  };
  static std::mutex& mutex() {
    static auto* instance = new std::mutex();
    return *instance;
  }
  static std::list<Entry>& entries() {
    static auto* instance = new std::list<Entry>();
    return *instance;
  }
};

std::unique_ptr<SharedChannel> SharedChannel::create(Store& store, const ChannelOptions& options) {
  Retired::collect();
  const Layout layout(options);
  BoardOptions board;
  board.rank = options.rank;
  board.size = options.size;
  board.payload_nbytes = layout.total_nbytes();
  board.timeout_s = options.timeout_s;
  board.name = options.name;
  board.global_ranks = options.global_ranks;
  board.remedy = "make it again on every rank, or restart the job";
  board.waits_fail_group = false;
  return std::unique_ptr<SharedChannel>(
      new SharedChannel(Board::create(store, board), layout, options));
}

SharedChannel::SharedChannel(std::shared_ptr<Board> board, const Layout& layout,
                             const ChannelOptions& options)
    : StepChannel(board->size()),
      board_(std::move(board)),
      failures_(reinterpret_cast<FailureRecords*>(board_->payload())),
      inline_nbytes_(std::min<size_t>(4 << 10, layout.ring_nbytes() / 4)),
      blocks_(std::make_shared<ArenaBlocks>(options.max_lent_nbytes)) {
  for (int r = 0; r < size(); ++r) {
    inboxes_.push_back(std::make_unique<Inbox>(*board_, layout, r));
    outboxes_.push_back(std::make_unique<Outbox>(board_, layout, r));
  }
}

SharedChannel::~SharedChannel() {
  if (in_forked_child()) return;  // the board is not mapped there
  Retired::add(std::move(outboxes_), std::move(blocks_));
  Retired::collect();
}

void SharedChannel::check() {
  board_->check([] { return "the begin of a step"; });
}

// -- messages ------------------------------------------------------------------------------------

// Completes the message in scratch_. Returns the block that has its payload, if any.
ArenaBlocks::Block SharedChannel::add_payload(const Message& message) {
  const size_t envelope_nbytes = scratch_.size();
  const size_t nbytes = image_nbytes(message);
  if (nbytes == 0) return {};
  if (nbytes > inline_nbytes_) {
    const ArenaBlocks::Block block = blocks_->take(nbytes);
    if (block.data != nullptr) {
      write_payload(message, block.data);
      set_payload_offset(scratch_, Arena::instance().offset_of(block.data));
      return block;
    }
  }
  ++counters_.num_inline;
  scratch_.resize(envelope_nbytes + nbytes);
  write_payload(message, scratch_.data() + envelope_nbytes);
  return {};
}

void SharedChannel::post(int destination, const Message& message, const Stamp& stamp) {
  constexpr size_t kKeptScratchNbytes = 1 << 20;
  Outbox& outbox = *outboxes_[destination];
  outbox.reclaim(*blocks_);
  outbox.hand_over();
  write_envelope(message, stamp, scratch_);
  const ArenaBlocks::Block block = add_payload(message);
  outbox.post(scratch_, block);
  if (scratch_.capacity() > kKeptScratchNbytes) scratch_ = {};
}

void SharedChannel::post_end_of_step(int destination, const Stamp& stamp) {
  write_end_of_step(stamp, scratch_);
  outboxes_[destination]->post(scratch_, {});
}

int SharedChannel::hand_over() {
  int first = kNobody;
  for (int r = 0; r < size(); ++r) {
    if (!outboxes_[r]->hand_over() && first == kNobody) first = r;
  }
  return first;
}

void SharedChannel::take_in() {
  for (int r = 0; r < size(); ++r) {
    const bool moved = inboxes_[r]->take_in(
        [&](const uint8_t* envelope, const uint8_t* payload) { arrive(r, envelope, payload); });
    if (moved && inboxes_[r]->made_room()) board_->ring(r);
  }
}

static_assert(Board::kNobody == -1);  // as StepChannel's

void SharedChannel::wait(const std::function<int()>& missing, const Describe& describe) {
  board_->wait(missing, describe);
}

// -- failures ------------------------------------------------------------------------------------

void SharedChannel::publish(const Failure& failure) noexcept {
  failures_[rank()].of(failure.generation).write(failure);
  board_->ring();
}

std::optional<Failure> SharedChannel::find_failure(const Stamp& stamp, bool /*urgent*/) {
  for (int r = 0; r < size(); ++r) {
    const FailureRecord& record = failures_[r].of(stamp.generation);
    if (r == rank() || record.generation() < stamp.generation) continue;
    std::optional<Failure> failure = record.read();
    if (failure && failure->ends(stamp.generation, stamp.step)) return failure;
  }
  return std::nullopt;
}

ChannelCounters SharedChannel::counters() const {
  ChannelCounters counters = StepChannel::counters();
  counters.lent_nbytes = blocks_->nbytes();
  return counters;
}

}  // namespace pydist
