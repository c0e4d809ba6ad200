// A communicator's operations in the order of their calls: at once in the calling thread, or later
// on one worker.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "transport/board.h"

namespace pydist {

// An operation that was started and may not have ended yet.
class Request {
 public:
  Request(std::shared_ptr<Board> board, std::string description)
      : board_(std::move(board)), description_(std::move(description)) {}
  virtual ~Request() = default;

  // True once it has ended, well or not.
  bool test() const { return done_.load(std::memory_order_acquire); }
  // Returns once it has ended; raises what it raised, or what a signal handler raises (which fails
  // the group).
  void wait();
  // The same, but raises TimeoutError if it has not ended after so many seconds; it goes on then.
  virtual void wait(double timeout_s);
  // What an operation that has ended raised; null if nothing.
  std::exception_ptr error() const { return error_; }
  // `action` is called once, when the operation has ended: by the thread that ends it, before
  // anybody's wait() returns, or here and now. It must not throw.
  void on_end(std::function<void()> action);
  // Of a receive that has ended: whose message it was.
  int source() const { return source_; }
  virtual std::string description() const { return description_; }

  // For whoever carries the operation out.
  void finish(std::exception_ptr error, int source = -1);

 protected:
  const std::shared_ptr<Board> board_;

 private:
  const std::string description_;
  std::mutex mutex_;
  std::condition_variable ended_;
  std::atomic<bool> done_{false};
  std::exception_ptr error_;
  int source_ = -1;
  std::vector<std::function<void()>> at_end_;
};

// Every operation draws a ticket when it is called, and runs when all earlier ones have ended:
//
//   run(f)     draws; waits for its turn, which is now if nothing is in flight; f(); next turn
//   start(f)   draws; the worker does the same
class OperationQueue {
 public:
  explicit OperationQueue(std::shared_ptr<Board> board) : board_(std::move(board)) {}
  // Operations that have not ended by now fail, and the group with them.
  ~OperationQueue();

  template <class Body>
  void run(Body&& body) {
    const uint64_t ticket = tickets_.fetch_add(1, std::memory_order_relaxed);
    if (turn_.load(std::memory_order_acquire) != ticket) await_turn(ticket);
    const Turn turn(*this, ticket);
    body();
  }

  std::shared_ptr<Request> start(std::function<void()> body, std::string description);

 private:
  struct Task {
    uint64_t ticket;
    std::function<void()> body;
    std::shared_ptr<Request> request;
  };
  // Gives the turn to the next ticket, whatever happens.
  class Turn {
   public:
    Turn(OperationQueue& queue, uint64_t ticket) : queue_(queue), ticket_(ticket) {}
    ~Turn() { queue_.pass_turn(ticket_ + 1); }

   private:
    OperationQueue& queue_;
    const uint64_t ticket_;
  };

  void await_turn(uint64_t ticket);
  void pass_turn(uint64_t ticket) {
    // seq_cst both: pairs with await_turn(), which announces itself and then reads the turn.
    turn_.store(ticket, std::memory_order_seq_cst);
    if (num_waiting_.load(std::memory_order_seq_cst) > 0) wake();
  }
  void wake();
  void work();

  const std::shared_ptr<Board> board_;
  std::atomic<uint64_t> tickets_{0};
  std::atomic<uint64_t> turn_{0};
  std::atomic<int> num_waiting_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  bool stopping_ = false;
  bool working_ = false;
  std::unique_ptr<std::thread> worker_;
};

}  // namespace pydist
