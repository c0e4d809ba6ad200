// Messages between two ranks: one ring per ordered pair, tags, and what arrives before it is asked
// for.
//
// Neither side holds a lock while it waits. Whoever waits, for a message or for room to send one,
// moves everything of this rank that can be moved: what has arrived to the receive that asked for
// it, else into private ("parked") memory, and what is queued into the rings. So a receiver that
// wants another tag, or two ranks that send to each other first, cannot block the channel. While
// nobody waits and asynchronous messages have not ended, the worker does the same; it sleeps until
// a peer rings.
//
// A receive refuses a message of another type or size: it raises, and so does the sender, there and
// then if it is still writing the message (which it then cuts short), else in its next send. The
// channel goes on after that message.
//
//   message_channel.h    what two ranks share
//   message_inbox.h      receives, and what has arrived
//   message_outbox.h     sends to one peer
//   message_transfer.h   one message of this rank
//   point_to_point.cpp   the calls, and who moves things
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "collective/call_counters.h"
#include "collective/message_inbox.h"
#include "collective/message_outbox.h"
#include "collective/message_transfer.h"
#include "collective/request.h"
#include "transport/board.h"

namespace pydist {

class PointToPoint : public std::enable_shared_from_this<PointToPoint> {
 public:
  static constexpr int kAnySource = Transfer::kAnySource;

  // What has ended well, tags below 0 aside.
  PointToPoint(std::shared_ptr<Board> board, const PayloadLayout& layout);
  // Ends it: sends that are in flight fail, and the group with them; receives fail.
  void close();

  // Returns once the message is in the ring or read by its receiver. Raises MismatchError, once, if
  // the receiver has refused this message or an earlier one; then this message is not sent.
  void send(const Buffer& buffer, int destination, int64_t tag);
  // Fills the buffer and returns the source. Raises MismatchError if the message with this tag is
  // of another type or size, which is then lost.
  int receive(const Buffer& buffer, int source, int64_t tag);

  // The same without waiting. Where nobody waits for it, a receive with a tag below 0 does not care
  // whether its source lives.
  std::shared_ptr<Request> start_send(const Buffer& buffer, int destination, int64_t tag,
                                      std::shared_ptr<void> keep_alive);
  std::shared_ptr<Request> start_receive(const Buffer& buffer, int source, int64_t tag,
                                         std::shared_ptr<void> keep_alive);

  const CallCounter& sent() const { return sent_; }
  const CallCounter& received() const { return received_; }

 private:
  friend class MessageRequest;
  class Driving;

  void run(Transfer& transfer);
  std::shared_ptr<Request> start(Transfer::Direction direction, const Buffer& buffer, int peer,
                                 int64_t tag, std::shared_ptr<void> keep_alive);
  void post(Transfer& transfer);
  void drive(const Transfer& transfer);
  void progress();
  void finish(const EndedRequests& ended);
  void count(const Transfer& transfer);
  template <class ErrorOf>
  void end_all(ErrorOf&& error_of);
  std::exception_ptr failure_of(const Transfer& transfer);

  // The worker.
  bool has_work() const { return num_pending_.load() > 0 && num_driving_.load() == 0; }
  void wake_worker();
  void work();
  void watch();
  int missing() const;
  std::string describe_one(int peer);
  std::atomic<int>& watched(int peer) const { return watched_[peer + 1]; }

  const std::shared_ptr<Board> board_;
  MessageInbox inbox_;
  std::vector<std::unique_ptr<MessageOutbox>> outboxes_;  // by destination
  CallCounter sent_, received_;

  std::atomic<int> num_pending_{0};              // asynchronous messages that have not ended
  std::unique_ptr<std::atomic<int>[]> watched_;  // of them those with a peer: by it, from any on
  std::atomic<int> num_driving_{0};              // threads that wait and move things
  std::atomic<bool> watching_{false};            // the worker does
  std::mutex mutex_;                             // of what follows
  std::condition_variable changed_;
  std::atomic<bool> stopping_{false};
  std::unique_ptr<std::thread> worker_;
};

// An asynchronous message.
class MessageRequest final : public Request {
 public:
  MessageRequest(PointToPoint& messages, Transfer::Direction direction, const Buffer& buffer,
                 int peer, int64_t tag, std::shared_ptr<void> keep_alive);

  // Moves this rank's messages meanwhile, within the group's time limit; the worker does where
  // there is a time limit of the caller's.
  void wait(double timeout_s) override;
  std::string description() const override { return transfer_.describe(*board_); }

 private:
  friend class PointToPoint;

  const std::weak_ptr<PointToPoint> messages_;
  Transfer transfer_;
  std::shared_ptr<void> keep_alive_;
};

}  // namespace pydist
