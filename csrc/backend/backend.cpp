#include "backend/backend.h"

#include <algorithm>
#include <limits>

#include "base/check.h"
#include "base/python_boundary.h"
#include "transport/wait_limit.h"

namespace pydist {

namespace {

double seconds_of(std::chrono::milliseconds time) {
  return std::chrono::duration<double>(time).count();
}

Collective invalid(std::string why) {
  Collective collective;
  collective.operation = Operation::kInvalid;
  collective.why = std::move(why);
  return collective;
}

}  // namespace

Backend::Backend(std::shared_ptr<Communicator> communicator, c10::intrusive_ptr<Options> options,
                 Split split)
    : c10d::Backend(communicator->rank(), communicator->size()),
      communicator_(std::move(communicator)),
      options_(std::move(options)),
      split_(std::move(split)) {
  init();
}

void Backend::setTimeout(std::chrono::milliseconds timeout) {
  options_->timeout = timeout;
  communicator_->set_timeout_s(seconds_of(timeout));
}

c10::intrusive_ptr<c10d::Backend> Backend::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                 const std::vector<int>& ranks,
                                                 const c10::intrusive_ptr<Options>& options) {
  // Collective over the part alone: the others have nothing to do.
  if (std::find(ranks.begin(), ranks.end(), getRank()) == ranks.end()) return nullptr;
  return split_(store, ranks, options ? options : options_);
}

void Backend::abort() {
  communicator_->fail(communicator_->describe(getRank()) + " aborted " + communicator_->name());
}

const at::Tensor& Backend::only(const Tensors& tensors) {
  PYDIST_CHECK(tensors.size() == 1, UsageError, "requires a single-element tensor list, found ",
               tensors.size(), " tensors");
  return tensors[0];
}

void Backend::check_root(int64_t root) const {
  PYDIST_CHECK(root >= 0 && root < getSize(), UsageError, "invalid root rank: ", root, " of ",
               getSize(), " ranks");
}

void Backend::check_length(size_t found, const char* what) const {
  PYDIST_CHECK(found == static_cast<size_t>(getSize()), UsageError, "incorrect ", what,
               " list size ", found, ". Expected ", getSize(), ", one for each rank");
}

Backend::WorkPointer Backend::launch(Plan plan, const How& how,
                                     const std::function<void(Plan&)>& fill) {
  try {
    fill(plan);
  } catch (const UsageError& error) {
    const std::string why = std::string(plan.title) + ": " + error.what();
    plan.steps = {invalid(why)};
    plan.forget_copies();
  }
  // Of a call's own limit, the engine's waits know in the calling thread; else only wait() does.
  const bool limited = how.timeout.count() > 0 && how.timeout != options_->timeout;
  const bool refused = !plan.steps.empty() && plan.steps[0].operation == Operation::kInvalid;
  auto work = c10::make_intrusive<Work>(communicator_, std::move(plan), ++sequence_);
  if (refused || !how.async_op) {
    std::optional<WaitLimit> limit;
    if (limited) limit.emplace(seconds_of(how.timeout));
    work->run([&] {
      for (const Collective& step : work->plan().steps) communicator_->run(step);
    });
    return work;
  }
  try {
    start(work, limited ? seconds_of(how.timeout) : std::numeric_limits<double>::infinity());
  } catch (...) {
    rethrow_through_torch(std::current_exception());
  }
  return work;
}

void Backend::start(const c10::intrusive_ptr<Work>& work, double timeout_s) {
  std::vector<std::shared_ptr<Request>> requests;
  for (const Collective& step : work->plan().steps) {
    requests.push_back(communicator_->start(step, work->keep_alive()));
  }
  follow(work, std::move(requests), timeout_s);
}

void Backend::follow(const c10::intrusive_ptr<Work>& work,
                     std::vector<std::shared_ptr<Request>> requests, double timeout_s) {
  work->follow(requests, timeout_s);
  const std::lock_guard<std::mutex> lock(coalescing_mutex_);
  if (coalesced_) coalesced_->insert(coalesced_->end(), requests.begin(), requests.end());
}

void Backend::startCoalescing() {
  const std::lock_guard<std::mutex> lock(coalescing_mutex_);
  coalesced_.emplace();
}

Backend::WorkPointer Backend::endCoalescing() {
  std::vector<std::shared_ptr<Request>> requests;
  {
    const std::lock_guard<std::mutex> lock(coalescing_mutex_);
    TORCH_CHECK(coalesced_, "endCoalescing() without startCoalescing()");
    requests = std::move(*coalesced_);
    coalesced_.reset();
  }
  auto work = c10::make_intrusive<Work>(
      communicator_, Plan(c10d::OpType::COALESCED, "pydist:coalesced"), sequence_.load());
  work->follow(std::move(requests), std::numeric_limits<double>::infinity());
  return work;
}

}  // namespace pydist
