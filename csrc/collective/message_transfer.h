// A message as the rank that sends or receives it sees it, from the call to the end.
#pragma once

#include <atomic>
#include <exception>
#include <memory>
#include <utility>
#include <vector>

#include "collective/message_channel.h"

namespace pydist {

class MessageRequest;
// Those that have ended but whose waiters have not been told: finish() runs what others have hung
// on them, so no lock may be held.
using EndedRequests = std::vector<std::shared_ptr<MessageRequest>>;

// It lives on the stack of a blocking call or in a MessageRequest. Boxes know its address until it
// ends, and end it under their lock.
struct Transfer {
  enum class Direction { kSend, kReceive };
  static constexpr int kAnySource = -1;

  Transfer(Direction direction, const Buffer& buffer, int peer, int64_t tag)
      : direction(direction), buffer(buffer), peer(peer), tag(tag) {}
  Transfer(const Transfer&) = delete;

  bool matches(int source, int64_t found_tag) const {
    return tag == found_tag && (peer == kAnySource || peer == source);
  }
  bool has_ended() const { return ended.load(std::memory_order_acquire); }
  void end(std::exception_ptr why, int from, EndedRequests& ended_requests) {
    error = std::move(why);
    source = from;
    if (request) ended_requests.push_back(std::move(request));
    // The release that publishes the rest, and the last touch: a blocking call may return now.
    ended.store(true, std::memory_order_release);
  }

  bool sends() const { return direction == Direction::kSend; }
  MessageHeader header() const { return MessageHeader::of(buffer, tag); }
  // "send of 12 float32 with tag 3 to rank 1 (pid 1234)"
  std::string describe(const Board& board) const {
    return concat(sends() ? "send" : "recv", " of ", header().describe(),
                  sends() ? " to " : " from ",
                  peer == kAnySource ? std::string("any rank") : board.describe(peer));
  }

  const Direction direction;
  const Buffer buffer;
  const int peer;
  const int64_t tag;
  std::exception_ptr error;
  int source = kAnySource;
  std::shared_ptr<MessageRequest> request;  // of an asynchronous one: itself, until it ends
  std::atomic<bool> ended{false};
};

}  // namespace pydist
