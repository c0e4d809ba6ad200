// What this rank sends to one peer: one message after the other, in the order of their calls.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>

#include "collective/message_channel.h"
#include "collective/message_transfer.h"

namespace pydist {

class MessageOutbox {
 public:
  MessageOutbox(std::shared_ptr<Board> board, const PayloadLayout& layout, int destination);

  // Queues a message, and writes what there is room for. It ends once all of it is in the ring, or
  // with MismatchError, once for each refusal that this rank learns of: then it is not sent.
  void post(Transfer* transfer, EndedRequests& ended);
  // Writes what there is room for now, about a ring's worth.
  void push(EndedRequests& ended);
  // The memory of a message that has not ended is about to go; the group has failed.
  void withdraw(Transfer* transfer);
  // Ends all messages that wait, each with error_of(transfer). What comes after is not sent.
  template <class ErrorOf>
  void end_all(ErrorOf&& error_of, EndedRequests& ended) {
    const std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    for (Transfer* transfer : queue_) transfer->end(error_of(*transfer), peer_, ended);
    queue_.clear();
    num_queued_.store(0);
  }
  template <class Visit>
  void visit(Visit&& visit_one) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const Transfer* transfer : queue_) visit_one(*transfer);
  }
  bool is_empty() const { return num_queued_.load() == 0; }

 private:
  enum class Step { kBlocked, kMoved, kEnded };

  void push_queue(EndedRequests& ended);
  Step push_head(EndedRequests& ended);
  size_t write_piece(const Transfer& transfer);
  void end_head(std::exception_ptr error, EndedRequests& ended);
  bool is_refused() const {
    return channel_->refusal.count.load(std::memory_order_acquire) != num_refusals_;
  }
  std::exception_ptr take_refusal();
  bool cut_was_seen() const {
    return channel_->refusal.cut_seen.load(std::memory_order_acquire) ==
           channel_->cut.message.load(std::memory_order_relaxed);
  }
  void cut_message();

  const std::shared_ptr<Board> board_;
  const int peer_;
  MessageChannel* const channel_;
  const size_t ring_nbytes_;
  std::mutex mutex_;
  std::atomic<size_t> num_queued_{0};
  // Guarded by the mutex.
  std::deque<Transfer*> queue_;
  RingWriter writer_;
  MessageHeader header_;       // of the head
  bool in_message_ = false;    // the head's header is in the ring, or part of it
  size_t written_ = 0;         // of the head's header and data together
  uint64_t num_messages_ = 0;  // begun, this one included
  uint64_t num_refusals_ = 0;  // that were raised
  bool closed_ = false;        // the stream has lost its place: the group has failed
};

}  // namespace pydist
