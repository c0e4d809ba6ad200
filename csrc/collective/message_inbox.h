// What all peers send to this rank: the receives that wait, and the messages that came before they
// were asked for.
//
// A message belongs to the first receive of its tag, in the order in which receives were posted,
// that takes messages of its source. Where there is none it is parked in private memory. One lock
// guards all of it, and is held while bytes are moved, never while one waits for them.
#pragma once

#include <atomic>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "collective/message_channel.h"
#include "collective/message_transfer.h"

namespace pydist {

class MessageInbox {
 public:
  MessageInbox(std::shared_ptr<Board> board, const PayloadLayout& layout);
  ~MessageInbox();

  // May end it at once, with a message that is parked.
  void post(Transfer* transfer, EndedRequests& ended);
  // Moves what has arrived; rings for the peers who got room.
  void pump(EndedRequests& ended);
  // The memory of a receive that has not ended is about to go.
  void withdraw(Transfer* transfer);
  // Ends all receives that wait, each with error_of(transfer).
  template <class ErrorOf>
  void end_all(ErrorOf&& error_of, EndedRequests& ended) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (Transfer* transfer : waiting()) transfer->end(error_of(*transfer), transfer->peer, ended);
    forget_all();
  }
  // visit(transfer) of each that waits.
  template <class Visit>
  void visit(Visit&& visit_one) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const Transfer* transfer : waiting()) visit_one(*transfer);
  }

 private:
  // What one source sends.
  struct Source;

  std::vector<Transfer*> waiting() const;
  void forget_all();
  bool pump_message(Source& source, EndedRequests& ended);
  void begin_message(Source& source, EndedRequests& ended);
  void end_cut_message(Source& source, EndedRequests& ended);
  bool take_parked(Transfer* transfer, EndedRequests& ended);
  bool take_parked_of(Source& source, Transfer* transfer, EndedRequests& ended);
  void refuse(Source& source, const MessageHeader& found, Transfer* transfer, EndedRequests& ended);

  const std::shared_ptr<Board> board_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Source>> sources_;  // by rank
  std::vector<Transfer*> posted_;                 // whose message has not begun to arrive
};

}  // namespace pydist
