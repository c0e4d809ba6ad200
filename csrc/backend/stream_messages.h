// Messages between the ranks of several hosts: tags and what arrives before it is asked for, over
// streams of bytes between any two ranks.
//
// The streams, with a thread for each peer, begin with the first message; what a peer has sent by
// then waits on its side. A receive refuses a message of another type or size, which is then lost.
#pragma once

#include <condition_variable>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "backend/byte_streams.h"
#include "collective/hosts_messages.h"
#include "collective/message_channel.h"
#include "transport/board.h"

namespace pydist {

class StreamMessages final : public HostsMessages {
 public:
  // Where the board fails, all receives do. `ranks`: how messages call them; `name` is the group's.
  StreamMessages(c10::intrusive_ptr<c10d::ProcessGroup> group, std::shared_ptr<Board> board,
                 std::vector<std::string> ranks, std::string name);
  // Waits a little for what is still being sent; receives that have not ended fail.
  ~StreamMessages() override;

  void send(const Buffer& buffer, int destination, int64_t tag) override;
  void receive(const Buffer& buffer, int source, int64_t tag, std::shared_ptr<void> keep_alive,
               std::shared_ptr<Request> request) override;

 private:
  struct Receive {
    Buffer buffer;
    int source;
    int64_t tag;
    std::shared_ptr<void> keep_alive;
    std::shared_ptr<Request> request;

    bool takes(int from, int64_t found_tag) const {
      return tag == found_tag && (source < 0 || source == from);
    }
  };
  // A receive whose message has come, or will not. Ended once no lock is held.
  struct Ended {
    Receive receive;
    std::exception_ptr error;
    int source;
  };
  using Arrived = ByteStreams::Arrived;

  ByteStreams& streams();
  void deliver();
  void deliver_once(std::vector<Ended>& ended);
  Ended hand_over(Receive receive, const Arrived& arrived) const;
  int lost_peer(const Receive& receive);
  std::exception_ptr loss_of(int peer);
  void end_all(const std::string& reason) noexcept;
  static void finish(std::vector<Ended>& ended);

  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const std::shared_ptr<Board> board_;
  const std::vector<std::string> ranks_;
  const std::string name_;
  std::mutex mutex_;  // of what follows; the streams' own is taken under it
  std::unique_ptr<ByteStreams> streams_;
  std::list<Receive> posted_;
  std::list<Arrived> parked_;  // came before it was asked for
  std::string failure_;        // empty while there is none
  bool stopping_ = false;
  std::thread deliverer_;
};

}  // namespace pydist
