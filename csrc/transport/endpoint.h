// Hands this process's shared memory to peers: one abstract Unix socket and one idle thread per
// process.
//
// A peer connects, sends the 16-byte token of what it wants (it learnt it through the Store), and
// gets the descriptor. The same thread holds the arena's life mutex for as long as the process
// lives.
#pragma once

#include <pthread.h>

#include <map>
#include <mutex>
#include <string>

#include "base/fd.h"
#include "transport/arena.h"

namespace pydist {

class Endpoint {
 public:
  // Started at first use, never stopped: the thread's death is how peers learn of ours.
  static Endpoint& instance();

  // The socket's abstract name, without the leading zero byte.
  const std::string& address() const { return address_; }
  // Offers a descriptor (a duplicate is kept) until withdrawn.
  void offer(const Token& token, int fd);
  void withdraw(const Token& token) noexcept;

  struct Fetched {
    Fd fd;
    Fd pidfd;  // of the process that answered; invalid where the kernel cannot say
  };
  // Asks the endpoint at `address`, which must belong to `uid`. Raises ResourceError saying why it
  // failed.
  static Fetched fetch(const std::string& address, const Token& token, uint32_t uid);

 private:
  Endpoint();
  static void* run(void* self);
  void serve();
  void answer(int connection);

  std::string address_;
  Fd listener_;
  ArenaControl* control_;
  std::mutex mutex_;
  std::map<Token, Fd> offers_;
  pthread_t thread_{};
  bool started_ = false;  // guarded by mutex_: the thread holds the life mutex
};

}  // namespace pydist
