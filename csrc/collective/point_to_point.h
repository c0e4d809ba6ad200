// Messages between two ranks: one ring per ordered pair, tags, and what arrives before it is asked
// for.
//
// Neither side holds a lock while it waits. Whoever waits, for a message or for room to send one,
// moves what has arrived from the rings into this process: to the receive that asked for it, else
// into private ("parked") memory. So a receiver that wants another tag, or two ranks that send to
// each other first, cannot block the channel.
//
// A receive refuses a message of another type or size: it raises, and so does the sender, there and
// then if it is still writing the message (which it then cuts short), else in its next send. The
// channel goes on after that message.
#pragma once

#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "collective/buffer.h"
#include "collective/message_ring.h"
#include "collective/payload_layout.h"
#include "transport/board.h"

namespace pydist {

struct MessageHeader {
  int64_t tag = 0;
  int64_t num_elements = 0;
  uint64_t dtype = 0;

  static MessageHeader of(const Buffer& buffer, int64_t tag) {
    return {tag, buffer.num_elements, static_cast<uint64_t>(buffer.dtype)};
  }
  size_t nbytes() const {
    return static_cast<size_t>(num_elements) * dtype_nbytes(static_cast<DType>(dtype));
  }
  bool fits(const Buffer& buffer) const {
    return num_elements == buffer.num_elements && dtype == static_cast<uint64_t>(buffer.dtype);
  }
  // "12 float32 with tag 3"
  std::string describe() const;
};

class PointToPoint {
 public:
  static constexpr int kAnySource = -1;

  PointToPoint(std::shared_ptr<Board> board, const PayloadLayout& layout);
  ~PointToPoint();

  // Returns once the message is in the ring or read by its receiver. Raises MismatchError, once, if
  // the receiver has refused this message or an earlier one; then this message is not sent.
  void send(const Buffer& buffer, int destination, int64_t tag);
  // Fills the buffer and returns the source. Raises MismatchError if the message with this tag is
  // of another type or size, which is then lost.
  int receive(const Buffer& buffer, int source, int64_t tag);

 private:
  class Inbox;
  class Outbox;
  class Posting;

  void pump_all();
  // Waits for the peer, taking in what arrives meanwhile.
  template <class Ready, class Describe>
  void await_progress(int peer, Ready&& ready, Describe&& describe);
  // The rank whose message with this tag was here and is taken; else kAnySource.
  int receive_any(const Buffer& buffer, int64_t tag);

  const std::shared_ptr<Board> board_;
  std::vector<std::unique_ptr<Inbox>> inboxes_;    // by source
  std::vector<std::unique_ptr<Outbox>> outboxes_;  // by destination
};

}  // namespace pydist
