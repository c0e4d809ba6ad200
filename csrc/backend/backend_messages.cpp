#include "backend/backend.h"
#include "base/check.h"
#include "base/python_boundary.h"
#include "collective/missing_ranks.h"

namespace pydist {

namespace {

std::string words_for(const std::vector<int>& missing, double timeout_s) {
  if (timeout_s <= 0) return "Rank 0 timed out in monitoredBarrier";
  std::string ranks;
  for (const int r : missing) ranks += (ranks.empty() ? "" : ", ") + std::to_string(r);
  return concat(missing.size() > 1 ? "Ranks " : "Rank ", ranks, " failed to pass monitoredBarrier");
}

}  // namespace

Backend::WorkPointer Backend::start_message(Plan plan, bool sends, const at::Tensor& tensor,
                                            int peer, int tag) {
  try {
    const Buffer buffer = sends ? plan.read(tensor) : plan.write(tensor);
    plan.inputs = {tensor};
    plan.outputs = {tensor};
    auto work = c10::make_intrusive<Work>(communicator_, std::move(plan), sequence_.load());
    auto request = sends ? communicator_->start_send(buffer, peer, tag, work->keep_alive())
                         : communicator_->start_receive(buffer, peer, tag, work->keep_alive());
    follow(work, {std::move(request)}, std::numeric_limits<double>::infinity());
    return work;
  } catch (...) {
    rethrow_through_torch(std::current_exception());
  }
}

Backend::WorkPointer Backend::send(Tensors& tensors, int destination, int tag) {
  return start_message(Plan(c10d::OpType::SEND, "pydist:send"), true, only(tensors), destination,
                       tag);
}

Backend::WorkPointer Backend::recv(Tensors& tensors, int source, int tag) {
  return start_message(Plan(c10d::OpType::RECV, "pydist:recv"), false, only(tensors), source, tag);
}

Backend::WorkPointer Backend::recvAnysource(Tensors& tensors, int tag) {
  return start_message(Plan(c10d::OpType::RECVANYSOURCE, "pydist:recvAnySource"), false,
                       only(tensors), Communicator::kAnySource, tag);
}

Backend::WorkPointer Backend::barrier(const c10d::BarrierOptions& options) {
  return launch(Plan(c10d::OpType::BARRIER, "pydist:barrier"), {options.timeout, is_async(options)},
                [](Plan& plan) { plan.steps.push_back(Collective{}); });
}

// Errors begin with the words that torch's own backend has for them.
void Backend::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) {
  const double timeout_s = options.timeout.count() >= 0
                               ? std::chrono::duration<double>(options.timeout).count()
                               : communicator_->timeout_s();
  try {
    try {
      communicator_->monitored_barrier(timeout_s, wait_all_ranks);
    } catch (const MissingRanks& missing) {
      throw TimeoutError(concat(words_for(missing.ranks, timeout_s), ": ", missing.what()));
    } catch (const TimeoutError& error) {
      throw TimeoutError(concat("Rank ", getRank(),
                                " successfully reached monitoredBarrier, but received errors while "
                                "waiting for send/recv from rank 0: ",
                                error.what()));
    }
  } catch (...) {
    rethrow_through_torch(std::current_exception());
  }
}

}  // namespace pydist
