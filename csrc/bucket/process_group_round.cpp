#include "bucket/process_group_round.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>

#include "base/check.h"
#include "base/clock.h"
#include "base/interrupt.h"

namespace pydist {

namespace {

constexpr double kYield_s = 1e-3;      // then sleep between looks
constexpr useconds_t kSleep_us = 100;  // a small part of what an all-reduce through sockets takes
constexpr double kTimeoutShare = 0.9;  // of the timeout: whoever waited that long ran into it
constexpr double kCheck_s = 0.1;       // between looks at signals and at peers' failures

at::ScalarType torch_dtype(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return at::kDouble;
    case DType::kFloat16:
      return at::kHalf;
    case DType::kBFloat16:
      return at::kBFloat16;
    default:
      return at::kFloat;
  }
}

}  // namespace

ProcessGroupRound::ProcessGroupRound(c10::intrusive_ptr<c10d::ProcessGroup> group,
                                     std::unique_ptr<Store> store, RoundOptions options)
    : group_(std::move(group)),
      store_(std::move(store)),
      options_(std::move(options)),
      memory_(options_.units.size()),
      published_(options_.units.size(), false),
      records_(group_->getSize(), RoundRecord(options_.num_parameters)) {}

std::string ProcessGroupRound::describe(int rank) const { return concat("rank ", rank); }

at::Tensor& ProcessGroupRound::memory(int unit) {
  at::Tensor& tensor = memory_[unit];
  if (!tensor.defined()) {
    const Unit& what = options_.units[unit];
    tensor = at::zeros({what.num_elements}, at::TensorOptions(torch_dtype(what.dtype)));
  }
  return tensor;
}

void* ProcessGroupRound::unit_memory(int unit) { return memory(unit).data_ptr(); }

std::shared_ptr<void> ProcessGroupRound::hold_memory(int unit) {
  auto held = std::make_shared<at::Tensor>(memory(unit));
  return std::shared_ptr<void>(held, held->data_ptr());
}

void ProcessGroupRound::begin() {
  if (!failure_.empty()) raise_failed("backward");
  ++round_;
  next_ = 0;
  std::fill(published_.begin(), published_.end(), false);
  launched_.clear();
}

// A process group needs the same order of calls on all ranks, so a unit waits for those before it.
void ProcessGroupRound::publish(int unit, void*) {
  published_[unit] = true;
  while (next_ < static_cast<int>(published_.size()) && published_[next_]) launch(next_++);
}

void ProcessGroupRound::launch_rest() {
  for (; next_ < static_cast<int>(published_.size()); ++next_) {
    if (published_[next_]) launch(next_);
  }
}

void ProcessGroupRound::launch(int unit) {
  const DType dtype = options_.units[unit].dtype;
  const bool is_half = dtype == DType::kFloat16 || dtype == DType::kBFloat16;
  Launched launched{unit, is_half ? memory(unit).to(at::kFloat) : memory(unit), nullptr};
  std::vector<at::Tensor> tensors{launched.wire};
  try {
    launched.work = group_->allreduce(tensors);
  } catch (const std::exception& error) {
    raise_lost("all-reducing " + options_.unit_names[unit], error.what(), 0);
  }
  launched_.push_back(std::move(launched));
}

const std::vector<RoundRecord>& ProcessGroupRound::end(const RoundRecord& mine) {
  launch_rest();
  const size_t words = mine.used.words().size();
  at::Tensor sent = at::empty({static_cast<int64_t>(3 * words)}, at::TensorOptions(at::kLong));
  auto* out = reinterpret_cast<uint64_t*>(sent.data_ptr<int64_t>());
  for (const Bitmap* bitmap : {&mine.used, &mine.again, &mine.trainable}) {
    out = std::copy(bitmap->words().begin(), bitmap->words().end(), out);
  }
  std::vector<std::vector<at::Tensor>> received(1);
  for (int r = 0; r < size(); ++r) received[0].push_back(at::empty_like(sent));
  std::vector<at::Tensor> inputs{sent};
  const std::string operation = "waiting for every rank to end backward";
  c10::intrusive_ptr<c10d::Work> work;
  try {
    work = group_->allgather(received, inputs);
  } catch (const std::exception& error) {
    raise_lost(operation, error.what(), 0);
  }
  await(work, operation);
  for (int r = 0; r < size(); ++r) {
    const auto* in = reinterpret_cast<const uint64_t*>(received[0][r].data_ptr<int64_t>());
    for (Bitmap* bitmap : {&records_[r].used, &records_[r].again, &records_[r].trainable}) {
      std::copy(in, in + words, bitmap->words().begin());
      in += words;
    }
  }
  return records_;
}

void ProcessGroupRound::finish() {
  for (Launched& launched : launched_) {
    await(launched.work, "all-reducing " + options_.unit_names[launched.unit]);
    launched.wire.mul_(1.0 / size());
    if (!launched.wire.is_same(memory(launched.unit))) memory(launched.unit).copy_(launched.wire);
    moved_nbytes_ += options_.units[launched.unit].nbytes();
  }
  launched_.clear();
}

void ProcessGroupRound::await(const c10::intrusive_ptr<c10d::Work>& work,
                              const std::string& operation) {
  const double start_s = monotonic_s();
  double next_check_s = start_s + kCheck_s;
  while (!work->isCompleted()) {
    const double now_s = monotonic_s();
    if (now_s - start_s < kYield_s) {
      ::sched_yield();
    } else {
      ::usleep(kSleep_us);
    }
    if (now_s < next_check_s) continue;
    next_check_s = now_s + kCheck_s;
    check_interrupt();
    if (store_->check("failure")) raise_failed(operation);
    if (now_s - start_s > options_.timeout_s) raise_timeout(operation);
  }
  wait_s_ += monotonic_s() - start_s;
  try {
    work->wait();
  } catch (const std::exception& error) {
    raise_lost(operation, error.what(), monotonic_s() - start_s);
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
  throw PeerError(concat(failure_, "; ", describe(rank()), " raises in round ", round_, ", ",
                         operation, ", and the process group cannot be used any more"));
}

void ProcessGroupRound::raise_timeout(const std::string& operation) {
  const std::string text = concat(describe(rank()), " waited ", options_.timeout_s,
                                  " s for its peers in round ", round_, ", ", operation);
  fail(text);
  throw TimeoutError(text + "; is every rank still running, and does it make the same calls?");
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
  failure_ = concat("a peer died or left: ", cause);
  fail(concat(describe(rank()), " lost a peer (", cause, ")"));
  throw PeerError(
      concat(failure_, "; ", describe(rank()), " raises in round ", round_, ", ", operation));
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
