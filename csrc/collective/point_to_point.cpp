#include "collective/point_to_point.h"

#include <cstring>
#include <exception>

#include "base/check.h"

namespace pydist {

namespace {

// The receiver's last refusal. Writer: the receiver. The words are atomic as the next refusal may
// overwrite them while the sender, who is then told of a mixture of the two, reads them.
struct alignas(kCacheLineNbytes) Refusal {
  std::atomic<uint64_t> count;  // the release that publishes the rest
  std::atomic<int64_t> tag;
  std::atomic<int64_t> expected_elements, found_elements;
  std::atomic<uint64_t> expected_dtype, found_dtype;
  std::atomic<uint64_t> cut_seen;  // the last Cut::message that was read to its end

  void publish(const MessageHeader& expected, const MessageHeader& found) {
    tag.store(found.tag, std::memory_order_relaxed);
    expected_elements.store(expected.num_elements, std::memory_order_relaxed);
    expected_dtype.store(expected.dtype, std::memory_order_relaxed);
    found_elements.store(found.num_elements, std::memory_order_relaxed);
    found_dtype.store(found.dtype, std::memory_order_relaxed);
    count.fetch_add(1, std::memory_order_release);
  }
  MessageHeader expected() const { return header(expected_elements, expected_dtype); }
  MessageHeader found() const { return header(found_elements, found_dtype); }

 private:
  MessageHeader header(const std::atomic<int64_t>& elements,
                       const std::atomic<uint64_t>& dtype) const {
    return {tag.load(std::memory_order_relaxed), elements.load(std::memory_order_relaxed),
            dtype.load(std::memory_order_relaxed)};
  }
};

// The last message that its sender cut short because one was refused, and where its bytes end.
// Writer: the sender, who begins no other message before the receiver has seen it.
struct alignas(kCacheLineNbytes) Cut {
  std::atomic<uint64_t> message;  // counted from 1; the release that publishes `end`
  std::atomic<uint64_t> end;
};

struct ChannelControl {
  RingControl ring;
  Refusal refusal;
  Cut cut;
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
  std::string refused = {};  // why the message did not fit
};

ChannelControl* control_of(const Board& board, const PayloadLayout& layout, int from, int to) {
  return reinterpret_cast<ChannelControl*>(board.payload() + layout.ring(from, to));
}

uint8_t* data_of(ChannelControl* control) { return reinterpret_cast<uint8_t*>(control + 1); }

}  // namespace

std::string MessageHeader::describe() const {
  return concat(num_elements, " ", dtype_name(static_cast<DType>(dtype)), " with tag ", tag);
}

// What one source sends to this rank. The mutex is held while bytes are moved, never while one
// waits for them.
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
    while (pump_message()) moved = true;
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
    if (target_ != posted) return;
    target_ = nullptr;  // its memory is about to go
    way_ = Way::kSkip;
  }

  // True once the posted receive has its message. Raises MismatchError if it has refused it.
  bool take(const Posted* posted) {
    const std::lock_guard<std::mutex> lock(mutex_);
    PYDIST_CHECK(posted->refused.empty(), MismatchError, posted->refused);
    return posted->done || take_parked(posted->buffer, posted->tag);
  }

  // Takes a message with this tag if there is a complete one.
  bool take_if_there(const Buffer& buffer, int64_t tag) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return take_parked(buffer, tag);
  }

 private:
  // Where the message that is arriving goes.
  enum class Way { kTarget, kPark, kSkip };

  // One step of the stream: a header, or a piece of a message. False when nothing more has arrived.
  bool pump_message() {
    if (!in_message_) {
      if (reader_.available_nbytes() < sizeof(header_)) return false;
      reader_.read(&header_, sizeof(header_));
      in_message_ = true;
      received_ = 0;
      ++num_messages_;
      choose_way();
      return true;
    }
    const size_t rest = header_.nbytes() - received_;
    const size_t moved = rest == 0 ? 0 : move(rest);
    received_ += moved;
    if (received_ == header_.nbytes()) {
      if (way_ == Way::kTarget) target_->done = true;
      if (way_ == Way::kPark) parked_.back().complete = true;
    } else if (is_cut()) {  // as if it had never been sent
      if (way_ == Way::kTarget) posted_.push_front(target_);
      if (way_ == Way::kPark) parked_.pop_back();
      control_->refusal.cut_seen.store(num_messages_, std::memory_order_release);
    } else {
      return moved > 0;
    }
    target_ = nullptr;
    in_message_ = false;
    return true;
  }

  size_t move(size_t nbytes) {
    if (way_ == Way::kSkip) return reader_.skip(nbytes);
    uint8_t* to = way_ == Way::kTarget ? target_->buffer.bytes() : parked_.back().data.get();
    return reader_.read(to + received_, nbytes);
  }

  // True if the sender has given this message up, and we have read all of it that there is.
  bool is_cut() const {
    const Cut& cut = control_->cut;
    return cut.message.load(std::memory_order_acquire) == num_messages_ &&
           cut.end.load(std::memory_order_relaxed) == reader_.position();
  }

  void choose_way() {
    for (auto it = posted_.begin(); it != posted_.end(); ++it) {
      Posted* posted = *it;
      if (posted->tag != header_.tag) continue;
      posted_.erase(it);
      if (header_.fits(posted->buffer)) {
        target_ = posted;
        way_ = Way::kTarget;
      } else {
        posted->refused = refuse(header_, posted->buffer);
        way_ = Way::kSkip;
      }
      return;
    }
    Parked parked;
    parked.header = header_;
    parked.data.reset(new uint8_t[header_.nbytes()]);
    parked_.push_back(std::move(parked));
    way_ = Way::kPark;
  }

  std::list<Parked>::iterator find_parked(int64_t tag) {
    auto it = parked_.begin();
    while (it != parked_.end() && it->header.tag != tag) ++it;
    return it;
  }

  bool take_parked(const Buffer& buffer, int64_t tag) {
    const auto it = find_parked(tag);
    if (it == parked_.end() || !it->complete) return false;
    const Parked parked = std::move(*it);
    parked_.erase(it);
    if (!parked.header.fits(buffer)) throw MismatchError(refuse(parked.header, buffer));
    if (buffer.nbytes() > 0) std::memcpy(buffer.data, parked.data.get(), buffer.nbytes());
    return true;
  }

  // Tells the sender; returns what to tell the receiver.
  std::string refuse(const MessageHeader& found, const Buffer& buffer) {
    const MessageHeader expected = MessageHeader::of(buffer, found.tag);
    control_->refusal.publish(expected, found);
    return concat("recv expected ", expected.describe(), ", but ", source_, " sent ",
                  found.describe(), "; make the tensors of the two agree");
  }

  std::mutex mutex_;
  ChannelControl* const control_;
  RingReader reader_;
  const std::string source_;
  MessageHeader header_;  // of the message that is arriving
  bool in_message_ = false;
  size_t received_ = 0;
  uint64_t num_messages_ = 0;  // this one included
  Way way_ = Way::kSkip;
  Posted* target_ = nullptr;
  std::list<Parked> parked_;  // the last may be arriving
  std::list<Posted*> posted_;
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
  void begin_message() { ++num_messages_; }
  void end() { sending_.store(false, std::memory_order_release); }

  bool refused() const {
    return control_->refusal.count.load(std::memory_order_acquire) != num_refusals_;
  }
  // Once for each refusal that this rank learns of.
  void raise_if_refused() {
    if (!refused()) return;
    num_refusals_ = control_->refusal.count.load(std::memory_order_acquire);
    throw MismatchError(concat(destination_, " refused a message of this rank: it expected ",
                               control_->refusal.expected().describe(), " and got ",
                               control_->refusal.found().describe(),
                               "; make the tensors of the two agree"));
  }
  bool cut_was_seen() const {
    return control_->refusal.cut_seen.load(std::memory_order_acquire) ==
           control_->cut.message.load(std::memory_order_relaxed);
  }
  // No more bytes of the current message follow.
  void cut_message() {
    control_->cut.end.store(writer_.position(), std::memory_order_relaxed);
    control_->cut.message.store(num_messages_, std::memory_order_release);
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
  uint64_t num_messages_ = 0;  // begun, this one included
  uint64_t num_refusals_ = 0;  // that were raised
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

template <class Ready, class Describe>
void PointToPoint::await_progress(int peer, Ready&& ready, Describe&& describe) {
  board_->wait(
      [&] {
        if (ready()) return Board::kNobody;
        pump_all();
        return peer;
      },
      describe);
}

void PointToPoint::send(const Buffer& buffer, int destination, int64_t tag) {
  Outbox& outbox = *outboxes_[destination];
  const MessageHeader header = MessageHeader::of(buffer, tag);
  const auto describe = [&] {
    return "send of " + header.describe() + " to " + board_->describe(destination);
  };
  board_->check(describe);
  board_->wait([&] { return outbox.try_begin() ? Board::kNobody : destination; }, describe);
  const struct End {
    Outbox& outbox;
    ~End() { outbox.end(); }
  } end{outbox};
  const auto write_all = [&](const void* from, size_t nbytes, bool may_cut) {
    const auto stops = [&] { return may_cut && outbox.refused(); };
    size_t written = 0;
    while (!stops()) {
      written += outbox.write(static_cast<const uint8_t*>(from) + written, nbytes - written);
      board_->ring();
      if (written == nbytes) return true;
      await_progress(destination, [&] { return outbox.has_room() || stops(); }, describe);
    }
    return false;
  };
  outbox.raise_if_refused();
  await_progress(destination, [&] { return outbox.cut_was_seen(); }, describe);
  outbox.begin_message();
  write_all(&header, sizeof(header), false);
  if (write_all(buffer.data, buffer.nbytes(), true)) return;
  outbox.cut_message();
  board_->ring();
  outbox.raise_if_refused();
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
  const MessageHeader wanted = MessageHeader::of(buffer, tag);
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
