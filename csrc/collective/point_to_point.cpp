#include "collective/point_to_point.h"

#include <cstring>
#include <exception>

#include "base/check.h"

namespace pydist {

namespace {

// What the receiver had asked for when it refused a message. Writer: the receiver, once.
struct alignas(kCacheLineNbytes) Refusal {
  std::atomic<uint32_t> set;  // the release that publishes the rest
  MessageHeader expected;
  MessageHeader found;
};

struct ChannelControl {
  RingControl ring;
  Refusal refusal;
};
static_assert(sizeof(ChannelControl) == PayloadLayout::kRingControlNbytes);

struct Parked {
  MessageHeader header;
  std::unique_ptr<uint8_t[]> data;
  bool complete = false;
};

// A receive that waits; lives on its caller's stack.
struct Posted {
  const Buffer& buffer;
  const int64_t tag;
  bool done = false;
};

ChannelControl* control_of(const Board& board, const PayloadLayout& layout, int from, int to) {
  return reinterpret_cast<ChannelControl*>(board.payload() + layout.ring(from, to));
}

uint8_t* data_of(ChannelControl* control) { return reinterpret_cast<uint8_t*>(control + 1); }

}  // namespace

std::string MessageHeader::describe() const {
  return concat(num_elements, " ", dtype_name(static_cast<DType>(dtype)), " with tag ", tag);
}

// What one source sends to this rank. The mutex is held while bytes are moved, never while one waits for them.
class PointToPoint::Inbox {
 public:
  Inbox(ChannelControl* control, size_t ring_nbytes, std::string source)
      : control_(control),
        reader_(&control->ring, data_of(control), ring_nbytes),
        source_(std::move(source)) {}

  // Moves what has arrived; true if that made room, so that the sender should be woken.
  bool pump() {
    const std::lock_guard<std::mutex> lock(mutex_);
    bool moved = false;
    while (refused_.empty() && pump_message()) moved = true;
    return moved;
  }

  void post(Posted* posted) {
    const std::lock_guard<std::mutex> lock(mutex_);
    // A message with this tag that is already here comes first, and is taken when it is complete.
    if (find_parked(posted->tag) == parked_.end()) posted_.push_back(posted);
  }

  void unpost(Posted* posted) {
    const std::lock_guard<std::mutex> lock(mutex_);
    posted_.remove(posted);
    if (target_ == posted) park();  // its memory is about to go; the rest of the message must still leave the ring
  }

  // True once the posted receive has its message. Raises MismatchError where it never will.
  bool take(const Posted* posted) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (posted->done || take_parked(posted->buffer, posted->tag)) return true;
    PYDIST_CHECK(refused_.empty(), MismatchError, refused_);
    return false;
  }

  // Takes a message with this tag if there is a complete one.
  bool take_if_there(const Buffer& buffer, int64_t tag) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return take_parked(buffer, tag);
  }

 private:
  // One step of the stream: a header, or a piece of a message. False when nothing more has arrived.
  bool pump_message() {
    if (!in_message_) {
      if (reader_.available_nbytes() < sizeof(header_)) return false;
      reader_.read(&header_, sizeof(header_));
      in_message_ = true;
      received_ = 0;
      choose_target();
      if (!refused_.empty()) return true;
    }
    uint8_t* to = target_ != nullptr ? target_->buffer.bytes() : parked_.back().data.get();
    const size_t rest = header_.nbytes() - received_;
    const size_t moved = rest == 0 ? 0 : reader_.read(to + received_, rest);
    received_ += moved;
    if (received_ < header_.nbytes()) return moved > 0;
    if (target_ != nullptr) {
      target_->done = true;
    } else {
      parked_.back().complete = true;
    }
    target_ = nullptr;
    in_message_ = false;
    return true;
  }

  void choose_target() {
    for (auto it = posted_.begin(); it != posted_.end(); ++it) {
      Posted* posted = *it;
      if (posted->tag != header_.tag) continue;
      if (!header_.fits(posted->buffer)) return refuse(header_, posted->buffer);
      target_ = posted;
      posted_.erase(it);
      return;
    }
    park();
  }

  // The message that is arriving goes to private memory. What a target already got of it is copied, though nobody will ask.
  void park() {
    Parked parked;
    parked.header = header_;
    parked.data.reset(new uint8_t[header_.nbytes()]);
    if (target_ != nullptr) std::memcpy(parked.data.get(), target_->buffer.data, received_);
    parked_.push_back(std::move(parked));
    target_ = nullptr;
  }

  std::list<Parked>::iterator find_parked(int64_t tag) {
    auto it = parked_.begin();
    while (it != parked_.end() && it->header.tag != tag) ++it;
    return it;
  }

  bool take_parked(const Buffer& buffer, int64_t tag) {
    const auto it = find_parked(tag);
    if (it == parked_.end() || !it->complete) return false;
    if (!it->header.fits(buffer)) {
      refuse(it->header, buffer);
      throw MismatchError(refused_);
    }
    if (buffer.nbytes() > 0) std::memcpy(buffer.data, it->data.get(), buffer.nbytes());
    parked_.erase(it);
    return true;
  }

  void refuse(const MessageHeader& found, const Buffer& expected) {
    if (!refused_.empty()) return;
    MessageHeader wanted = found;
    wanted.num_elements = expected.num_elements;
    wanted.dtype = static_cast<uint64_t>(expected.dtype);
    refused_ = concat("recv expected ", wanted.describe(), ", but ", source_, " sent ",
                      found.describe(), "; messages from it cannot be received any more");
    control_->refusal.expected = wanted;
    control_->refusal.found = found;
    control_->refusal.set.store(1, std::memory_order_release);
  }

  std::mutex mutex_;
  ChannelControl* const control_;
  RingReader reader_;
  const std::string source_;
  MessageHeader header_;  // of the message that is arriving
  bool in_message_ = false;
  size_t received_ = 0;
  Posted* target_ = nullptr;  // null: the last of parked_
  std::list<Parked> parked_;
  std::list<Posted*> posted_;
  std::string refused_;
};

// What this rank sends to one destination: one message at a time.
class PointToPoint::Outbox {
 public:
  Outbox(ChannelControl* control, size_t ring_nbytes, std::string destination)
      : control_(control),
        writer_(&control->ring, data_of(control), ring_nbytes),
        piece_nbytes_(ring_nbytes / 4),
        destination_(std::move(destination)) {}

  bool try_begin() { return !sending_.exchange(true, std::memory_order_acquire); }
  void end() { sending_.store(false, std::memory_order_release); }

  bool refused() const { return control_->refusal.set.load(std::memory_order_acquire) != 0; }
  void raise_if_refused() const {
    PYDIST_CHECK(!refused(), MismatchError, destination_, " refused a message of this rank: it expected ",
                 control_->refusal.expected.describe(), " and got ",
                 control_->refusal.found.describe(), "; nothing can be sent to it any more");
  }
  bool has_room() const { return writer_.free_nbytes() > 0; }
  // In pieces, so that the receiver copies one while the next is written.
  size_t write(const void* from, size_t nbytes) {
    return writer_.write(from, std::min(nbytes, piece_nbytes_));
  }

 private:
  ChannelControl* const control_;
  RingWriter writer_;
  const size_t piece_nbytes_;
  const std::string destination_;
  std::atomic<bool> sending_{false};
};

PointToPoint::PointToPoint(std::shared_ptr<Board> board, const PayloadLayout& layout)
    : board_(std::move(board)) {
  const int rank = board_->rank();
  for (int r = 0; r < board_->size(); ++r) {
    inboxes_.push_back(std::make_unique<Inbox>(control_of(*board_, layout, r, rank),
                                               layout.ring_nbytes(), board_->describe(r)));
    outboxes_.push_back(std::make_unique<Outbox>(control_of(*board_, layout, rank, r),
                                                 layout.ring_nbytes(), board_->describe(r)));
  }
}

PointToPoint::~PointToPoint() = default;

void PointToPoint::pump_all() {
  bool moved = false;
  for (auto& inbox : inboxes_) moved |= inbox->pump();
  if (moved) board_->ring();
}

void PointToPoint::send(const Buffer& buffer, int destination, int64_t tag) {
  Outbox& outbox = *outboxes_[destination];
  const MessageHeader header{tag, buffer.num_elements, static_cast<uint64_t>(buffer.dtype)};
  const auto describe = [&] {
    return "send of " + header.describe() + " to " + board_->describe(destination);
  };
  board_->check(describe);
  board_->wait([&] { return outbox.try_begin() ? Board::kNobody : destination; }, describe);
  const struct End {
    Outbox& outbox;
    ~End() { outbox.end(); }
  } end{outbox};
  const auto write_all = [&](const uint8_t* from, size_t nbytes) {
    for (size_t written = 0; written < nbytes;) {
      outbox.raise_if_refused();
      written += outbox.write(from + written, nbytes - written);
      board_->ring();
      if (written == nbytes) return;
      board_->wait(
          [&] {
            if (outbox.has_room() || outbox.refused()) return Board::kNobody;
            pump_all();
            return destination;
          },
          describe);
    }
  };
  outbox.raise_if_refused();
  write_all(reinterpret_cast<const uint8_t*>(&header), sizeof(header));
  write_all(buffer.bytes(), buffer.nbytes());
}

// A receive from one source, posted while this lives.
class PointToPoint::Posting {
 public:
  Posting(Inbox* inbox, const Buffer& buffer, int64_t tag) : inbox_(inbox), posted_{buffer, tag} {
    if (inbox_ != nullptr) inbox_->post(&posted_);
  }
  ~Posting() {
    if (inbox_ != nullptr) inbox_->unpost(&posted_);
  }
  bool take() const { return inbox_->take(&posted_); }

 private:
  Inbox* const inbox_;
  Posted posted_;
};

int PointToPoint::receive_any(const Buffer& buffer, int64_t tag) {
  for (int r = 0; r < board_->size(); ++r) {
    if (inboxes_[r]->take_if_there(buffer, tag)) return r;
  }
  return kAnySource;
}

int PointToPoint::receive(const Buffer& buffer, int source, int64_t tag) {
  const MessageHeader wanted{tag, buffer.num_elements, static_cast<uint64_t>(buffer.dtype)};
  const auto describe = [&] {
    return "recv of " + wanted.describe() + " from " +
           (source == kAnySource ? std::string("any rank") : board_->describe(source));
  };
  board_->check(describe);
  const Posting posting(source == kAnySource ? nullptr : inboxes_[source].get(), buffer, tag);
  const int missing = source == kAnySource ? Board::kAnybody : source;
  std::exception_ptr error;  // a wait must not be left by an exception of ours
  board_->wait(
      [&] {
        pump_all();
        try {
          if (missing == Board::kAnybody) {
            source = receive_any(buffer, tag);
            return source == kAnySource ? missing : Board::kNobody;
          }
          return posting.take() ? Board::kNobody : missing;
        } catch (const MismatchError&) {
          error = std::current_exception();
          return Board::kNobody;
        }
      },
      describe);
  if (!error) return source;
  board_->ring();  // the sender may be waiting for room
  std::rethrow_exception(error);
}

}  // namespace pydist
