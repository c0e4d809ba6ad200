#include "collective/message_outbox.h"

#include <algorithm>

#include "base/error.h"

namespace pydist {

MessageOutbox::MessageOutbox(std::shared_ptr<Board> board, const PayloadLayout& layout,
                             int destination)
    : board_(std::move(board)),
      peer_(destination),
      channel_(MessageChannel::of(*board_, layout, board_->rank(), destination)),
      ring_nbytes_(layout.ring_nbytes()),
      writer_(&channel_->ring, channel_->data(), ring_nbytes_) {}

void MessageOutbox::post(Transfer* transfer, EndedRequests& ended) {
  const std::lock_guard<std::mutex> lock(mutex_);
  queue_.push_back(transfer);
  // Before the ring is looked at: whoever is woken by room in it then sees that somebody waits.
  num_queued_.store(queue_.size());
  push_queue(ended);
}

void MessageOutbox::push(EndedRequests& ended) {
  if (is_empty()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  push_queue(ended);
}

void MessageOutbox::withdraw(Transfer* transfer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto it = std::find(queue_.begin(), queue_.end(), transfer);
  if (it == queue_.end()) return;
  if (it == queue_.begin() && in_message_) closed_ = true;
  queue_.erase(it);
  num_queued_.store(queue_.size());
}

void MessageOutbox::push_queue(EndedRequests& ended) {
  const uint64_t enough = writer_.position() + ring_nbytes_;
  while (!queue_.empty() && !closed_ && writer_.position() < enough) {
    if (push_head(ended) == Step::kBlocked) return;
  }
}

MessageOutbox::Step MessageOutbox::push_head(EndedRequests& ended) {
  const Transfer& head = *queue_.front();
  if (!in_message_) {
    if (is_refused()) {
      end_head(take_refusal(), ended);
      return Step::kEnded;
    }
    if (!cut_was_seen()) return Step::kBlocked;
    header_ = head.header();
    in_message_ = true;
    written_ = 0;
    ++num_messages_;
  }
  // The receiver finds the place of a message that is cut short by its header, so that goes first.
  if (written_ >= sizeof(header_) && head.buffer.nbytes() > 0 && is_refused()) {
    cut_message();
    end_head(take_refusal(), ended);
    return Step::kEnded;
  }
  const size_t moved = write_piece(head);
  written_ += moved;
  if (moved > 0) board_->ring(peer_);
  if (written_ < sizeof(header_) + head.buffer.nbytes()) {
    return moved > 0 ? Step::kMoved : Step::kBlocked;
  }
  end_head(nullptr, ended);
  return Step::kEnded;
}

// In pieces, so that the receiver copies one while the next is written.
size_t MessageOutbox::write_piece(const Transfer& transfer) {
  size_t moved = 0;
  if (written_ < sizeof(header_)) {
    const auto* header = reinterpret_cast<const uint8_t*>(&header_);
    moved = writer_.write(header + written_, sizeof(header_) - written_);
    if (written_ + moved < sizeof(header_)) return moved;
  }
  const size_t begin = written_ + moved - sizeof(header_);
  const size_t nbytes = std::min(transfer.buffer.nbytes() - begin, ring_nbytes_ / 4);
  if (nbytes > 0) moved += writer_.write(transfer.buffer.bytes() + begin, nbytes);
  return moved;
}

void MessageOutbox::end_head(std::exception_ptr error, EndedRequests& ended) {
  Transfer* head = queue_.front();
  queue_.pop_front();
  num_queued_.store(queue_.size());
  in_message_ = false;
  head->end(std::move(error), peer_, ended);
}

std::exception_ptr MessageOutbox::take_refusal() {
  const Refusal& refusal = channel_->refusal;
  num_refusals_ = refusal.count.load(std::memory_order_acquire);
  return std::make_exception_ptr(
      MismatchError(concat(board_->describe(peer_), " refused a message of this rank: it expected ",
                           refusal.expected().describe(), " and got ", refusal.found().describe(),
                           "; make the tensors of the two agree")));
}

// No more bytes of the current message follow.
void MessageOutbox::cut_message() {
  channel_->cut.end.store(writer_.position(), std::memory_order_relaxed);
  channel_->cut.message.store(num_messages_, std::memory_order_release);
  board_->ring(peer_);
}

}  // namespace pydist
