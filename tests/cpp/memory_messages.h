// Messages within the process, for tests of communicators over several hosts: ranks are threads.
#pragma once

#include <algorithm>
#include <cstring>
#include <list>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "collective/hosts_messages.h"
#include "transport/board.h"

namespace pydist {

// What all ranks have sent and not received yet.
class MemoryMail {
 public:
  struct Letter {
    int source;
    int destination;
    int64_t tag;
    std::vector<uint8_t> data;
  };
  struct Receive {
    int destination;
    Buffer buffer;
    int source;
    int64_t tag;
    std::shared_ptr<Request> request;
    bool takes(const Letter& letter) const {
      return destination == letter.destination && tag == letter.tag &&
             (source < 0 || source == letter.source);
    }
  };

  void send(Letter letter) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto taker = std::find_if(receives_.begin(), receives_.end(),
                                    [&](const Receive& one) { return one.takes(letter); });
    if (taker == receives_.end()) return letters_.push_back(std::move(letter));
    const Receive receive = std::move(*taker);
    receives_.erase(taker);
    lock.unlock();
    hand_over(receive, letter);
  }
  void receive(Receive receive) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto found = std::find_if(letters_.begin(), letters_.end(),
                                    [&](const Letter& one) { return receive.takes(one); });
    if (found == letters_.end()) return receives_.push_back(std::move(receive));
    const Letter letter = std::move(*found);
    letters_.erase(found);
    lock.unlock();
    hand_over(receive, letter);
  }
  // A rank's memory is about to go.
  void forget(int rank) {
    const std::lock_guard<std::mutex> lock(mutex_);
    receives_.remove_if([rank](const Receive& one) { return one.destination == rank; });
  }

 private:
  static void hand_over(const Receive& receive, const Letter& letter) {
    std::memcpy(receive.buffer.data, letter.data.data(), receive.buffer.nbytes());
    receive.request->finish(nullptr, letter.source);
  }

  std::mutex mutex_;
  std::list<Letter> letters_;
  std::list<Receive> receives_;
};

class MemoryMessages final : public HostsMessages {
 public:
  MemoryMessages(std::shared_ptr<MemoryMail> mail, int rank)
      : mail_(std::move(mail)), rank_(rank) {}
  ~MemoryMessages() override { mail_->forget(rank_); }

  void send(const Buffer& buffer, int destination, int64_t tag) override {
    const uint8_t* bytes = buffer.bytes();
    mail_->send({rank_, destination, tag, std::vector<uint8_t>(bytes, bytes + buffer.nbytes())});
  }
  void receive(const Buffer& buffer, int source, int64_t tag, std::shared_ptr<void>,
               std::shared_ptr<Request> request) override {
    mail_->receive({rank_, buffer, source, tag, std::move(request)});
  }

 private:
  const std::shared_ptr<MemoryMail> mail_;
  const int rank_;
};

}  // namespace pydist
