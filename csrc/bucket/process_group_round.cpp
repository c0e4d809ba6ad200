#include "bucket/process_group_round.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <unistd.h>

#include <algorithm>

#include "base/check.h"
#include "base/clock.h"
#include "base/interrupt.h"
#include "base/polling.h"

namespace pydist {

namespace {

constexpr useconds_t kSleep_us = 100;  // a small part of what an all-reduce through sockets takes
constexpr double kTimeoutShare = 0.9;  // of the timeout: whoever waited that long ran into it
constexpr double kCheck_s = 0.1;       // between looks at signals and at peers' failures
constexpr double kSign_s = 1;          // for the others to say that they have noticed a failure too

bool is_half(DType dtype) { return dtype == DType::kFloat16 || dtype == DType::kBFloat16; }

}  // namespace

ProcessGroupRound::ProcessGroupRound(c10::intrusive_ptr<c10d::ProcessGroup> group,
                                     std::unique_ptr<Store> store, RoundOptions options)
    : OrderedRound(std::move(options), group->getSize()),
      group_(std::move(group)),
      store_(std::move(store)),
      memory_(options_.units.size()) {}

// A group whose calls will never be complete waits for them when it ends: it may not end.
ProcessGroupRound::~ProcessGroupRound() {
  if (!failure_.empty()) new c10::intrusive_ptr<c10d::ProcessGroup>(group_);
}

std::string ProcessGroupRound::describe(int rank) const { return concat("rank ", rank); }

ProcessGroupRound::Memory& ProcessGroupRound::memory(int unit) {
  Memory& made = memory_[unit];
  const Unit& what = options_.units[unit];
  if (is_half(what.dtype)) {
    if (!made.slices) {
      made.slices = std::make_shared<SlicedMean>(group_, what.dtype, what.num_elements);
    }
  } else if (!made.whole.defined()) {
    const at::ScalarType dtype = what.dtype == DType::kFloat64 ? at::kDouble : at::kFloat;
    made.whole = at::zeros({what.num_elements}, at::TensorOptions(dtype));
  }
  return made;
}

void* ProcessGroupRound::unit_memory(int unit) {
  const Memory& made = memory(unit);
  return made.slices ? made.slices->memory() : made.whole.data_ptr();
}

std::shared_ptr<void> ProcessGroupRound::hold_memory(int unit) {
  auto held = std::make_shared<Memory>(memory(unit));
  return std::shared_ptr<void>(held, unit_memory(unit));
}

void ProcessGroupRound::begin(int divisor) {
  if (!failure_.empty()) raise_failed("backward");
  OrderedRound::begin(divisor);
  launched_.clear();
}

void ProcessGroupRound::launch(int unit, void*) {
  const Start all_reduce = [&] {
    const Memory& made = memory(unit);
    if (made.slices) return made.slices->exchange();
    std::vector<at::Tensor> tensors{made.whole};
    return group_->allreduce(tensors);
  };
  launched_.push_back({unit, start(reducing(unit), all_reduce)});
}

c10::intrusive_ptr<c10d::Work> ProcessGroupRound::start(const std::string& operation,
                                                        const Start& collective) {
  try {
    return collective();
  } catch (const std::exception& error) {
    raise_lost(operation, error.what(), 0);
  }
}

void ProcessGroupRound::exchange(const std::vector<uint64_t>& mine, uint64_t* all) {
  const auto words = static_cast<int64_t>(mine.size());
  at::Tensor sent = at::empty({words}, at::TensorOptions(at::kLong));
  std::copy(mine.begin(), mine.end(), sent.data_ptr<int64_t>());
  std::vector<std::vector<at::Tensor>> received(1);
  for (int r = 0; r < size(); ++r) received[0].push_back(at::empty_like(sent));
  std::vector<at::Tensor> inputs{sent};
  const std::string operation = "waiting for every rank to end backward";
  await(start(operation, [&] { return group_->allgather(received, inputs); }), operation);
  for (const at::Tensor& theirs : received[0]) {
    all = std::copy_n(theirs.data_ptr<int64_t>(), words, all);
  }
}

// Slices are gathered only now: a process group needs one order of calls on all ranks, and when an
// exchange is through differs from rank to rank.
void ProcessGroupRound::finish() {
  std::vector<Launched> gathers;
  for (const Launched& launched : launched_) {
    await(launched.work, reducing(launched.unit));
    const Memory& made = memory(launched.unit);
    if (made.slices) {
      const Start gather = [&] { return made.slices->gather(divisor()); };
      gathers.push_back({launched.unit, start(reducing(launched.unit), gather)});
    } else {
      made.whole.mul_(1.0 / divisor());
    }
    moved_nbytes_ += options_.units[launched.unit].nbytes();
  }
  launched_.clear();
  for (const Launched& gather : gathers) await(gather.work, reducing(gather.unit));
}

void ProcessGroupRound::await(const c10::intrusive_ptr<c10d::Work>& work,
                              const std::string& operation) {
  Polling polling(kSleep_us);
  while (!work->isCompleted()) {
    if (!polling.pause()) continue;
    check_interrupt();
    if (store_->check("failure")) raise_failed(operation);
    if (store_->check("sign")) leave_sign();
    if (polling.waited_s() > options_.timeout_s) raise_timeout(operation);
  }
  wait_s_ += polling.waited_s();
  try {
    work->wait();
  } catch (const std::exception& error) {
    raise_lost(operation, error.what(), polling.waited_s());
  }
}

void ProcessGroupRound::check() {
  if (!failure_.empty()) raise_failed("backward");
}

void ProcessGroupRound::check_now() {
  if (!failure_.empty() || store_->check("failure")) raise_failed("backward");
}

void ProcessGroupRound::raise_failed(const std::string& operation) {
  if (failure_.empty()) failure_ = store_->get("failure");
  throw PeerError(concat(failure_, "; ", describe(rank()), " raises in round ", number(), ", ",
                         operation,
                         ", and its process group cannot be used any more: ", options_.remedy));
}

void ProcessGroupRound::raise_timeout(const std::string& operation) {
  const std::string text = concat(describe(rank()), " waited ", options_.timeout_s, " s for ",
                                  absent_ranks(), " in round ", number(), ", ", operation);
  fail(text);
  throw TimeoutError(text + "; is every rank still running, and does it make the same calls?");
}

// A process group does not say whom it waits for: once one rank has run into a failure, all that
// wait leave a sign, and the others are the ones that are missing.
void ProcessGroupRound::leave_sign() { store_->set(concat("sign/", rank()), ""); }

std::string ProcessGroupRound::absent_ranks() noexcept {
  std::string names;
  try {
    store_->set("sign", "");
    leave_sign();
    const double deadline_s = monotonic_s() + kSign_s;
    for (int r = 0; r < size(); ++r) {
      const std::string key = concat("sign/", r);
      while (!store_->check(key) && monotonic_s() < deadline_s) ::usleep(10 * kSleep_us);
      if (!store_->check(key)) names += concat(names.empty() ? "" : ", ", describe(r));
    }
  } catch (const std::exception&) {
    // The store is gone together with the rank that kept it.
  }
  return names.empty() ? "a peer" : names;
}

// The process group says that a connection broke, not whose: a peer that raised has told the store,
// one that died has not. It may also have run into its own time limit, which is ours, just before
// we did.
void ProcessGroupRound::raise_lost(const std::string& operation, const char* cause,
                                   double waited_s) {
  if (waited_s > kTimeoutShare * options_.timeout_s) raise_timeout(operation);
  const double deadline_s = monotonic_s() + kCheck_s;
  while (monotonic_s() < deadline_s) {
    if (store_->check("failure")) raise_failed(operation);
    ::usleep(10 * kSleep_us);
  }
  failure_ = concat("a connection broke, and ", absent_ranks(), " gave no sign of life: ", cause);
  fail(concat(describe(rank()), " says: ", failure_));
  throw PeerError(
      concat(failure_, "; ", describe(rank()), " raises in round ", number(), ", ", operation));
}

void ProcessGroupRound::fail(const std::string& reason) noexcept {
  if (failure_.empty()) failure_ = reason;
  try {
    if (!store_->check("failure")) store_->set("failure", reason);
  } catch (const std::exception&) {
    // The store is gone together with the rank that kept it; peers learn from their broken
    // connections.
  }
}

// The process group owns its buffers, and works on ours only while a unit's tensor lives.
bool ProcessGroupRound::drain() noexcept {
  launched_.clear();
  return true;
}

}  // namespace pydist
