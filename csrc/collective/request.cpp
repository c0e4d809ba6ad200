#include "collective/request.h"

#include <algorithm>
#include <chrono>
#include <limits>

#include "base/check.h"
#include "base/clock.h"
#include "base/fork.h"
#include "base/interrupt.h"

namespace pydist {

namespace {

constexpr std::chrono::milliseconds kSlice{50};  // how late a signal may be noticed

}  // namespace

void Request::wait() { wait(std::numeric_limits<double>::infinity()); }

void Request::wait(double timeout_s) {
  const double deadline_s = monotonic_s() + timeout_s;
  std::unique_lock<std::mutex> lock(mutex_);
  while (!test()) {
    board_->check_process();
    PYDIST_CHECK(monotonic_s() < deadline_s, TimeoutError, board_->describe(board_->rank()),
                 " waited ", timeout_s, " s for ", description(),
                 ", which goes on; wait longer, or look at what its peers do");
    ended_.wait_for(lock, std::min<std::chrono::duration<double>>(
                              kSlice, std::chrono::duration<double>(deadline_s - monotonic_s())));
    lock.unlock();
    try {
      check_interrupt();
    } catch (...) {
      board_->fail(board_->describe(board_->rank()) + " was interrupted while it waited for " +
                   description());
      throw;
    }
    lock.lock();
  }
  if (error_) std::rethrow_exception(error_);
}

void Request::on_end(std::function<void()> action) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!test()) {
      at_end_.push_back(std::move(action));
      return;
    }
  }
  action();
}

// Actions run before the end is announced: what they set, whoever waits may rely on.
void Request::finish(std::exception_ptr error, int source) {
  std::unique_lock<std::mutex> lock(mutex_);
  error_ = std::move(error);
  source_ = source;
  while (!at_end_.empty()) {
    const auto actions = std::move(at_end_);
    at_end_.clear();
    lock.unlock();
    for (const auto& action : actions) action();
    lock.lock();
  }
  done_.store(true, std::memory_order_release);
  ended_.notify_all();
}

OperationQueue::~OperationQueue() {
  if (in_forked_child()) {
    (void)worker_.release();  // it does not run here
    return;
  }
  if (!worker_) return;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    if (working_ || !tasks_.empty()) {
      board_->fail(board_->describe(board_->rank()) + " left " + board_->name() +
                   " while an operation was in flight");
    }
    changed_.notify_all();
  }
  worker_->join();
}

std::shared_ptr<Request> OperationQueue::start(std::function<void()> body,
                                               std::string description) {
  board_->check_process();
  auto request = std::make_shared<Request>(board_, std::move(description));
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!worker_) {
    const BlockSignals block_signals;
    worker_ = std::make_unique<std::thread>([this] { work(); });
  }
  tasks_.push_back({tickets_.fetch_add(1, std::memory_order_relaxed), std::move(body), request});
  changed_.notify_all();
  return request;
}

void OperationQueue::await_turn(uint64_t ticket) {
  num_waiting_.fetch_add(1, std::memory_order_seq_cst);
  std::unique_lock<std::mutex> lock(mutex_);
  std::exception_ptr interrupted;
  while (turn_.load(std::memory_order_seq_cst) != ticket) {
    changed_.wait_for(lock, kSlice);
    if (interrupted) continue;
    lock.unlock();
    try {
      check_interrupt();
    } catch (...) {
      // Earlier operations now end soon; this one's ticket must still be passed on.
      interrupted = std::current_exception();
      board_->fail(board_->describe(board_->rank()) + " was interrupted while it waited its turn");
    }
    lock.lock();
  }
  num_waiting_.fetch_sub(1, std::memory_order_relaxed);
  if (!interrupted) return;
  lock.unlock();
  pass_turn(ticket + 1);
  std::rethrow_exception(interrupted);
}

void OperationQueue::wake() {
  const std::lock_guard<std::mutex> lock(mutex_);
  changed_.notify_all();
}

void OperationQueue::work() {
  const WithoutInterrupts without_interrupts;
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stopping_ || !tasks_.empty(); });
    if (tasks_.empty()) return;
    Task task = std::move(tasks_.front());
    tasks_.pop_front();
    working_ = true;
    lock.unlock();
    std::exception_ptr error;
    if (turn_.load(std::memory_order_acquire) != task.ticket) await_turn(task.ticket);
    try {
      const Turn turn(*this, task.ticket);
      task.body();
    } catch (...) {
      error = std::current_exception();
    }
    task.body = nullptr;  // what it keeps alive goes before the request is seen to have ended
    task.request->finish(error);
    lock.lock();
    working_ = false;
  }
}

}  // namespace pydist
