// An operation of the backend that was started, as torch sees it.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "backend/plan.h"
#include "collective/communicator.h"
#include "collective/request.h"

namespace pydist {

// What is to be done when an operation has ended, in the thread that ends it: often a
// communicator's own, which must not hold the last reference to the communicator.
class Ending {
 public:
  explicit Ending(Plan plan) : plan_(std::move(plan)) {}
  Plan& plan() { return plan_; }
  bool has_ended() const { return ended_.load(std::memory_order_acquire); }
  std::exception_ptr error() const { return has_ended() ? error_ : nullptr; }
  // Once; without `error` the operation went well.
  void end(std::exception_ptr error);
  // Complete a little later than has_ended(), as what users attached to it runs first.
  c10::intrusive_ptr<c10::ivalue::Future> future();
  // Returns once the future that somebody has asked for is complete, which the end made certain.
  void await_future();

  std::function<void()> at_end = nullptr;  // set before it can end

 private:
  static void complete(const c10::intrusive_ptr<c10::ivalue::Future>& future,
                       const std::vector<at::Tensor>& outputs, const std::exception_ptr& error);

  Plan plan_;
  std::atomic<bool> ended_{false};
  std::exception_ptr error_;
  std::mutex mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

class Work final : public c10d::Work {
 public:
  Work(std::shared_ptr<Communicator> communicator, Plan plan, uint64_t sequence);

  Plan& plan() { return ending_->plan(); }
  // Holds the tensors.
  std::shared_ptr<void> keep_alive() const { return ending_; }
  // One of these, once. `body` is the operation, here and now; raises what it raises.
  void run(const std::function<void()>& body);
  // The operation ends when all of these have. Waits last timeout_s unless they say otherwise.
  void follow(std::vector<std::shared_ptr<Request>> requests, double timeout_s);

  bool isCompleted() override { return ending_->has_ended(); }
  bool isSuccess() const override { return ending_->has_ended() && !ending_->error(); }
  std::exception_ptr exception() const override { return ending_->error(); }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override { wait(); }
  // Fails the group: its other operations end too, on all ranks.
  void abort() override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override { return ending_->plan().outputs; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return ending_->future(); }
  uint64_t getSequencenumber() const override { return sequence_; }

 private:
  const std::shared_ptr<Communicator> communicator_;
  const std::shared_ptr<Ending> ending_;
  const uint64_t sequence_;
  double deadline_s_;
  std::vector<std::shared_ptr<Request>> requests_;
};

}  // namespace pydist
