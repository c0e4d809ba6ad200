#include "bucket/host_round.h"

#include <unistd.h>

#include <utility>

#include "base/check.h"
#include "base/clock.h"
#include "base/fork.h"

namespace pydist {

namespace {

constexpr double kDrain_s = 10;
constexpr useconds_t kSleep_us = 100;

}  // namespace

HostRound::HostRound(std::shared_ptr<HostsCommunicator> communicator, std::optional<DType> wire,
                     RoundOptions options)
    : OrderedRound(std::move(options), communicator->size()),
      communicator_(std::move(communicator)),
      wire_(wire),
      memory_(options_.units) {}

HostRound::~HostRound() {
  if (!in_forked_child() && drain()) memory_.give_back();
}

void HostRound::begin(int divisor) {
  check();
  OrderedRound::begin(divisor);
  launched_.clear();
}

void HostRound::launch(int unit, void* data) {
  const Unit& what = options_.units[unit];
  const Buffer buffer{data, what.num_elements, what.dtype, data};
  Collective all_reduce{Operation::kAllReduce, ReduceOp::kMean, 0, {}, buffer};
  all_reduce.divisor = divisor();
  all_reduce.wire = wire_;
  all_reduce.agreed = true;  // ranks have compared their models when they made the round
  launched_.push_back({unit, communicator_->start(std::move(all_reduce), nullptr)});
}

// What a unit's reduction raised tells more than what that has done to the calls behind it.
void HostRound::exchange(const std::vector<uint64_t>& mine, uint64_t* all) {
  const auto nbytes = static_cast<int64_t>(mine.size() * sizeof(uint64_t));
  const Buffer input{const_cast<uint64_t*>(mine.data()), nbytes, DType::kUInt8};
  const Buffer output{all, nbytes * size(), DType::kUInt8};
  const auto request = communicator_->start(
      Collective{Operation::kAllGather, ReduceOp::kSum, 0, input, output}, nullptr);
  try {
    await_units();
    await(*request);
  } catch (...) {
    while (!request->test()) ::usleep(kSleep_us);  // the group has failed, so that is soon
    throw;
  }
}

void HostRound::finish() {
  await_units();
  for (const Launched& launched : launched_) {
    moved_nbytes_ += options_.units[launched.unit].nbytes();
  }
  launched_.clear();
}

void HostRound::await_units() {
  for (const Launched& launched : launched_) await(*launched.request);
}

void HostRound::await(Request& request) {
  const double start_s = monotonic_s();
  request.wait();
  wait_s_ += monotonic_s() - start_s;
}

void HostRound::check() {
  communicator_->board().check(
      [this] { return concat("round ", number(), " of gradient reduction, backward"); });
}

// The ranks of this host write into it only as long as this one takes part.
bool HostRound::drain() noexcept {
  if (in_forked_child()) return false;  // its worker is not here
  const double deadline_s = monotonic_s() + kDrain_s;
  for (const Launched& launched : launched_) {
    while (!launched.request->test()) {
      if (monotonic_s() > deadline_s) return false;
      ::usleep(kSleep_us);
    }
  }
  return true;
}

}  // namespace pydist
