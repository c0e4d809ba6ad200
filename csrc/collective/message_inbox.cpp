#include "collective/message_inbox.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"

namespace pydist {

namespace {

struct Parked {
  MessageHeader header;
  std::unique_ptr<uint8_t[]> data;
};

}  // namespace

struct MessageInbox::Source {
  // Where the message that is arriving goes; a parked one is the last of its list until it is
  // complete.
  enum class Way { kTarget, kPark, kSkip };

  Source(int rank, MessageChannel* channel, size_t ring_nbytes)
      : rank(rank), channel(channel), reader(&channel->ring, channel->data(), ring_nbytes) {}

  size_t move(size_t nbytes) {
    if (way == Way::kSkip) return reader.skip(nbytes);
    uint8_t* to = way == Way::kTarget ? target->buffer.bytes() : parked.back().data.get();
    return reader.read(to + received, nbytes);
  }
  // True if the sender has given this message up, and we have read all of it that there is.
  bool is_cut() const {
    const Cut& cut = channel->cut;
    return cut.message.load(std::memory_order_acquire) == num_messages &&
           cut.end.load(std::memory_order_relaxed) == reader.position();
  }
  bool is_arriving(std::list<Parked>::iterator it) const {
    return in_message && way == Way::kPark && &*it == &parked.back();
  }

  void forget(const Transfer* transfer) {
    if (target == nullptr || target != transfer) return;
    target = nullptr;
    way = Way::kSkip;
  }

  const int rank;
  MessageChannel* const channel;
  RingReader reader;
  MessageHeader header;  // of the message that is arriving
  bool in_message = false;
  size_t received = 0;
  uint64_t num_messages = 0;  // this one included
  Way way = Way::kSkip;
  Transfer* target = nullptr;
  std::list<Parked> parked;
};

MessageInbox::MessageInbox(std::shared_ptr<Board> board, const PayloadLayout& layout)
    : board_(std::move(board)) {
  for (int r = 0; r < board_->size(); ++r) {
    sources_.push_back(std::make_unique<Source>(
        r, MessageChannel::of(*board_, layout, r, board_->rank()), layout.ring_nbytes()));
  }
}

MessageInbox::~MessageInbox() = default;

void MessageInbox::post(Transfer* transfer, EndedRequests& ended) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!take_parked(transfer, ended)) posted_.push_back(transfer);
}

void MessageInbox::pump(EndedRequests& ended) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto& source : sources_) {
    bool moved = false;
    while (pump_message(*source, ended)) moved = true;
    if (moved) board_->ring(source->rank);
  }
}

void MessageInbox::withdraw(Transfer* transfer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  posted_.erase(std::remove(posted_.begin(), posted_.end(), transfer), posted_.end());
  for (auto& source : sources_) source->forget(transfer);
}

std::vector<Transfer*> MessageInbox::waiting() const {
  std::vector<Transfer*> transfers = posted_;
  for (const auto& source : sources_) {
    if (source->target != nullptr) transfers.push_back(source->target);
  }
  return transfers;
}

void MessageInbox::forget_all() {
  posted_.clear();
  for (auto& source : sources_) source->forget(source->target);
}

// One step of the stream: a header, or a piece of a message. False when nothing more has arrived.
bool MessageInbox::pump_message(Source& source, EndedRequests& ended) {
  if (!source.in_message) {
    if (source.reader.available_nbytes() < sizeof(source.header)) return false;
    source.reader.read(&source.header, sizeof(source.header));
    source.in_message = true;
    source.received = 0;
    ++source.num_messages;
    begin_message(source, ended);
    return true;
  }
  const size_t rest = source.header.nbytes() - source.received;
  const size_t moved = rest == 0 ? 0 : source.move(rest);
  source.received += moved;
  const bool complete = source.received == source.header.nbytes();
  if (!complete && !source.is_cut()) return moved > 0;
  source.in_message = false;
  Transfer* target = std::exchange(source.target, nullptr);
  if (complete) {
    if (target != nullptr) target->end(nullptr, source.rank, ended);
    return true;
  }
  // As if it had never been sent.
  if (target != nullptr && !take_parked(target, ended)) posted_.insert(posted_.begin(), target);
  if (source.way == Source::Way::kPark) source.parked.pop_back();
  source.channel->refusal.cut_seen.store(source.num_messages, std::memory_order_release);
  return true;
}

// Finds out where the message whose header has arrived goes.
void MessageInbox::begin_message(Source& source, EndedRequests& ended) {
  const MessageHeader& header = source.header;
  const auto it = std::find_if(posted_.begin(), posted_.end(), [&](const Transfer* transfer) {
    return transfer->matches(source.rank, header.tag);
  });
  if (it == posted_.end()) {
    source.way = Source::Way::kPark;
    source.parked.push_back({header, std::unique_ptr<uint8_t[]>(new uint8_t[header.nbytes()])});
    return;
  }
  Transfer* transfer = *it;
  posted_.erase(it);
  if (header.fits(transfer->buffer)) {
    source.way = Source::Way::kTarget;
    source.target = transfer;
  } else {
    source.way = Source::Way::kSkip;
    refuse(source, header, transfer, ended);
  }
}

// True if there was a message for it, which it gets, or waits for no more than the rest of.
bool MessageInbox::take_parked(Transfer* transfer, EndedRequests& ended) {
  for (auto& source : sources_) {
    if (transfer->matches(source->rank, transfer->tag) &&
        take_parked_of(*source, transfer, ended)) {
      return true;
    }
  }
  return false;
}

bool MessageInbox::take_parked_of(Source& source, Transfer* transfer, EndedRequests& ended) {
  const auto it =
      std::find_if(source.parked.begin(), source.parked.end(),
                   [&](const Parked& parked) { return parked.header.tag == transfer->tag; });
  if (it == source.parked.end()) return false;
  const bool arriving = source.is_arriving(it);
  const Parked parked = std::move(*it);
  source.parked.erase(it);
  if (arriving) source.way = Source::Way::kSkip;
  if (!parked.header.fits(transfer->buffer)) {
    refuse(source, parked.header, transfer, ended);
    return true;
  }
  const size_t nbytes = arriving ? source.received : parked.header.nbytes();
  if (nbytes > 0) std::memcpy(transfer->buffer.data, parked.data.get(), nbytes);
  if (arriving) {
    source.way = Source::Way::kTarget;
    source.target = transfer;
  } else {
    transfer->end(nullptr, source.rank, ended);
  }
  return true;
}

// Tells the sender, who may be waiting for room, and the receiver.
void MessageInbox::refuse(Source& source, const MessageHeader& found, Transfer* transfer,
                          EndedRequests& ended) {
  const MessageHeader expected = transfer->header();
  source.channel->refusal.publish(expected, found);
  board_->ring(source.rank);
  const std::string text =
      concat("recv expected ", expected.describe(), ", but ", board_->describe(source.rank),
             " sent ", found.describe(), "; make the tensors of the two agree");
  transfer->end(std::make_exception_ptr(MismatchError(text)), source.rank, ended);
}

}  // namespace pydist
