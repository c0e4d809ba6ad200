#include "backend/work.h"

#include <limits>

#include "backend/callback_threads.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/python_boundary.h"

namespace pydist {

namespace {

constexpr double kUnlimited_s = std::numeric_limits<double>::infinity();

double seconds_of(std::chrono::milliseconds time) {
  return std::chrono::duration<double>(time).count();
}

c10::intrusive_ptr<c10::ivalue::Future> new_future() {
  return c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors());
}

// Of several requests: how many have not ended, and the first error.
struct Gathered {
  explicit Gathered(size_t num_left) : num_left(num_left) {}

  bool is_last(std::exception_ptr found) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (!error) error = std::move(found);
    return --num_left == 0;
  }

  std::mutex mutex;
  size_t num_left;
  std::exception_ptr error;
};

}  // namespace

void Ending::end(std::exception_ptr error) {
  if (!error) {
    try {
      plan_.copy_back();
    } catch (...) {
      error = std::current_exception();
    }
  }
  plan_.steps.clear();
  if (at_end) at_end();
  const std::lock_guard<std::mutex> lock(mutex_);
  error_ = std::move(error);
  ended_.store(true, std::memory_order_release);
  if (!future_) return;
  // What is attached to the future may wait for other operations, which this thread carries out.
  run_callbacks_elsewhere([future = future_, outputs = plan_.outputs, error = error_] {
    complete(future, outputs, error);
  });
}

c10::intrusive_ptr<c10::ivalue::Future> Ending::future() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!future_) {
    future_ = new_future();
    if (has_ended()) complete(future_, plan_.outputs, error_);
  }
  return future_;
}

void Ending::await_future() {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    future = future_;
  }
  if (future) future->wait();
}

// Torch raises it again whenever somebody asks, as a RuntimeError: an exception of Python could be
// raised but once.
void Ending::complete(const c10::intrusive_ptr<c10::ivalue::Future>& future,
                      const std::vector<at::Tensor>& outputs, const std::exception_ptr& error) {
  if (error) {
    future->setError(error);
  } else {
    future->markCompleted(c10::IValue(outputs));
  }
}

Work::Work(std::shared_ptr<Communicator> communicator, Plan plan, uint64_t sequence)
    : c10d::Work(communicator->rank(), plan.type, plan.title, plan.inputs),
      communicator_(std::move(communicator)),
      ending_(std::make_shared<Ending>(std::move(plan))),
      sequence_(sequence),
      deadline_s_(kUnlimited_s) {
  ending_->at_end = std::move(recordFunctionEndCallback_);
}

void Work::run(const std::function<void()>& body) {
  try {
    body();
  } catch (...) {
    ending_->end(std::current_exception());
    rethrow_through_torch(std::current_exception());
  }
  ending_->end(nullptr);
  if (ending_->error()) rethrow_through_torch(ending_->error());
}

void Work::follow(std::vector<std::shared_ptr<Request>> requests, double timeout_s) {
  deadline_s_ = monotonic_s() + timeout_s;
  requests_ = std::move(requests);
  if (requests_.empty()) return ending_->end(nullptr);
  // Requests of several kinds end in any order.
  auto gathered = std::make_shared<Gathered>(requests_.size());
  for (const auto& request : requests_) {
    request->on_end([ending = ending_, gathered, request = request.get()] {
      if (gathered->is_last(request->error())) ending->end(gathered->error);
    });
  }
}

bool Work::wait(std::chrono::milliseconds timeout) {
  const bool own_limit = timeout != kNoTimeout && timeout >= std::chrono::milliseconds(0);
  const double deadline_s = own_limit ? monotonic_s() + seconds_of(timeout) : deadline_s_;
  try {
    for (const auto& request : requests_) {
      const bool limited = deadline_s < kUnlimited_s;
      request->wait(limited ? std::max(0.0, deadline_s - monotonic_s()) : kUnlimited_s);
    }
    if (ending_->error()) std::rethrow_exception(ending_->error());
  } catch (...) {
    rethrow_through_torch(std::current_exception());
  }
  ending_->await_future();
  return true;
}

void Work::abort() {
  communicator_->fail(communicator_->describe(communicator_->rank()) + " aborted an operation of " +
                      communicator_->name());
}

int Work::sourceRank() const {
  TORCH_CHECK(opType_ == c10d::OpType::RECVANYSOURCE || opType_ == c10d::OpType::RECV,
              "sourceRank() is of a recv alone");
  return requests_.empty() ? -1 : requests_.back()->source();
}

}  // namespace pydist
