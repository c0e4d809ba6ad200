#include "backend/callback_threads.h"

#include <pthread.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "base/interrupt.h"

namespace pydist {

namespace {

constexpr std::chrono::seconds kPatience{1};  // how long a thread waits for its next task

// There is always a thread for the next task: one that waits, or a new one.
class CallbackThreads {
 public:
  void run(std::function<void()> task) {
    const std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back(std::move(task));
    if (num_idle_ >= tasks_.size()) {
      changed_.notify_one();
      return;
    }
    const BlockSignals block_signals;
    std::thread([this] { work(); }).detach();
  }

 private:
  void work() {
    const WithoutInterrupts without_interrupts;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      ++num_idle_;
      const bool more = changed_.wait_for(lock, kPatience, [this] { return !tasks_.empty(); });
      --num_idle_;
      if (!more) return;
      std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      task = nullptr;
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  size_t num_idle_ = 0;
};

// Never destroyed, as its threads end with the process. A forked child has none of them.
CallbackThreads* threads = nullptr;

CallbackThreads& callback_threads() {
  static std::once_flag once;
  std::call_once(once, [] {
    threads = new CallbackThreads;
    pthread_atfork(nullptr, nullptr, [] { threads = new CallbackThreads; });
  });
  return *threads;
}

}  // namespace

void run_callbacks_elsewhere(std::function<void()> task) {
  callback_threads().run(std::move(task));
}

}  // namespace pydist
