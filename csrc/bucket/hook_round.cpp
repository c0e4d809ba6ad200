#include "bucket/hook_round.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/zeros.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

#include "base/check.h"
#include "base/clock.h"
#include "base/interrupt.h"
#include "base/polling.h"

namespace pydist {

namespace {

constexpr useconds_t kSleep_us = 50;

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& exception) {
    return first_line(exception.what());
  } catch (...) {
    return "an unknown error";
  }
}

// The same bits in a bitmap of another size; those beyond it are lost.
Bitmap resized(const Bitmap& from, int size) {
  Bitmap to(size);
  for (int i = 0; i < size && i < 64 * static_cast<int>(from.words().size()); ++i) {
    if (from.test(i)) to.set(i);
  }
  return to;
}

RoundRecord resized(const RoundRecord& from, int size) {
  RoundRecord to = from;
  for (Bitmap RoundRecord::* bits :
       {&RoundRecord::used, &RoundRecord::again, &RoundRecord::trainable}) {
    to.*bits = resized(from.*bits, size);
  }
  return to;
}

}  // namespace

RoundOptions HookRound::inner_options(const RoundOptions& options) {
  RoundOptions inner;
  inner.num_parameters = options.num_parameters + 1;
  inner.timeout_s = options.timeout_s;
  inner.remedy = options.remedy;
  return inner;
}

HookRound::HookRound(std::unique_ptr<Round> inner, std::unique_ptr<c10d::CommHookInterface> hook,
                     std::unique_ptr<Store> store, std::vector<at::Tensor> parameters,
                     RoundOptions options)
    : inner_(std::move(inner)),
      hook_(std::move(hook)),
      store_(std::move(store)),
      parameters_(std::move(parameters)),
      options_(std::move(options)),
      memory_(options_.units.size()),
      published_(options_.units.size(), false),
      records_(inner_->size(), RoundRecord(options_.num_parameters)) {}

at::Tensor& HookRound::memory(int unit) {
  at::Tensor& tensor = memory_[unit];
  if (!tensor.defined()) {
    const at::Tensor& sample = parameters_[options_.units[unit].members.front().parameter];
    const int64_t elements = options_.units[unit].num_elements / (sample.is_complex() ? 2 : 1);
    tensor = at::zeros({elements}, sample.options().requires_grad(false));
  }
  return tensor;
}

std::shared_ptr<void> HookRound::hold_memory(int unit) {
  auto held = std::make_shared<at::Tensor>(memory(unit));
  return std::shared_ptr<void>(held, held->data_ptr());
}

void HookRound::begin(int divisor) {
  inner_->begin(divisor);
  ++round_;
  second_ = false;
  next_ = 0;
  error_ = nullptr;
  std::fill(published_.begin(), published_.end(), false);
}

void HookRound::begin_second(int divisor) {
  begin(divisor);
  second_ = true;
}

void HookRound::publish(int unit, void*) {
  published_[unit] = true;
  wait_for_hook(false);
}

// Does all that needs no waiting. Units stay unpublished in a second round only, which has them all
// before it ends.
void HookRound::advance(bool skip_unpublished) {
  const int num_units = static_cast<int>(published_.size());
  while (error_ == nullptr) {
    if (future_ != nullptr) {
      if (!future_->completed()) return;
      take_result();
    } else if (next_ < num_units && published_[next_]) {
      hand_over(next_++);
    } else if (next_ < num_units && skip_unpublished) {
      ++next_;
    } else {
      return;
    }
  }
}

// Like torch's, the bucket has the gradients undivided: the hook divides.
c10d::GradBucket HookRound::bucket(int unit) {
  const Unit& what = options_.units[unit];
  std::vector<size_t> offsets;
  std::vector<size_t> lengths;
  std::vector<c10::IntArrayRef> sizes;
  std::vector<at::Tensor> parameters;
  for (const Member& member : what.members) {
    const at::Tensor& parameter = parameters_[member.parameter];
    offsets.push_back(static_cast<size_t>(member.begin) / (parameter.is_complex() ? 2 : 1));
    lengths.push_back(static_cast<size_t>(parameter.numel()));
    sizes.push_back(parameter.sizes());
    parameters.push_back(parameter);
  }
  // In a second round of one backward the hook has seen the last bucket before.
  const size_t count = options_.units.size() + (second_ ? 1 : 0);
  return c10d::GradBucket(static_cast<size_t>(unit), count, memory(unit), std::move(offsets),
                          std::move(lengths), std::move(sizes), std::move(parameters),
                          std::nullopt);
}

void HookRound::hand_over(int unit) {
  if (unit == 0) handed_ns_ = monotonic_ns();
  current_ = unit;
  try {
    c10d::GradBucket handed = bucket(unit);
    future_ = hook_->runHook(handed);
  } catch (...) {
    error_ = std::current_exception();
  }
}

void HookRound::take_result() {
  const auto future = std::move(future_);
  future_ = nullptr;
  try {
    future->waitAndThrow();  // it is complete: the current stream waits for what it stands for
    copy_result(current_, hook_->parseHookResult(future->value()));
  } catch (...) {
    error_ = std::current_exception();
  }
}

void HookRound::copy_result(int unit, at::Tensor result) {
  const at::NoGradGuard no_grad;
  at::Tensor& target = memory(unit);
  const auto is_pairs = [&] {  // what an all-reduce makes of complex numbers
    return target.is_complex() && result.is_floating_point() && result.dim() > 0 &&
           result.size(-1) == 2 && result.numel() == 2 * target.numel();
  };
  if (result.defined() && is_pairs()) result = at::view_as_complex(result.contiguous());
  PYDIST_CHECK(result.defined() && result.numel() == target.numel(), UsageError,
               "the communication hook's future for ", bucket_name(unit), " holds ",
               result.defined() ? concat("a tensor of ", result.numel()) : "no tensor instead of",
               " elements; it must hold one tensor of the ", target.numel(), " in the bucket");
  moved_nbytes_ += options_.units[unit].nbytes();
  const bool in_place = result.data_ptr() == target.data_ptr() &&
                        result.scalar_type() == target.scalar_type() && result.is_contiguous();
  if (!in_place) target.copy_(result.reshape({-1}));
}

const std::vector<RoundRecord>& HookRound::end(const RoundRecord& mine) {
  if (next_ > 0) hidden_ns_ += monotonic_ns() - handed_ns_;
  const double inner_wait_s = inner_->wait_s();
  // First the hook, then the records: its calls and ours may use the same process group.
  wait_for_hook(true);
  if (error_ != nullptr) announce_error();
  RoundRecord wide = resized(mine, options_.num_parameters + 1);
  if (error_ != nullptr) wide.used.set(options_.num_parameters);
  try {
    settle_error(inner_->end(wide));
  } catch (const PeerError&) {
    if (error_ != nullptr) std::rethrow_exception(error_);  // the peer gave up because of ours
    throw;
  }
  inner_->finish();
  wait_s_ += inner_->wait_s() - inner_wait_s;
  return records_;
}

// Where the hook raised here, the others have to be asked whether it did there.
bool HookRound::end_unanswered(const RoundRecord& mine) {
  if (!inner_->answers_late()) return false;
  wait_for_hook(true);
  return error_ == nullptr && inner_->end_unanswered(resized(mine, options_.num_parameters + 1));
}

// Who raised alone has told the others by itself.
const std::vector<RoundRecord>* HookRound::late_records() {
  const std::vector<RoundRecord>* records = inner_->late_records();
  if (records == nullptr) return nullptr;
  for (int r = 0; r < size(); ++r) records_[r] = resized((*records)[r], options_.num_parameters);
  return &records_;
}

// Raises if the hook raised anywhere.
void HookRound::settle_error(const std::vector<RoundRecord>& records) {
  int num_raised = 0;
  int first = -1;
  for (int r = 0; r < size(); ++r) {
    records_[r] = resized(records[r], options_.num_parameters);
    if (!records[r].used.test(options_.num_parameters)) continue;
    if (num_raised++ == 0) first = r;
  }
  if (num_raised == 0) return;
  if (error_ == nullptr) give_up(first);
  settled_ = num_raised == size();
  if (!settled_) {
    inner_->fail(concat(describe(rank()), "'s communication hook raised for ",
                        bucket_name(current_), " (", text_of(error_), "), not on every rank"));
  }
  std::rethrow_exception(error_);
}

// Not overlapped with backward: what the hook calls would else be mixed, by chance and differently
// on every rank, with calls that backward makes on the same process group.
void HookRound::wait_for_hook(bool skip_unpublished) {
  Polling polling(kSleep_us);
  for (advance(skip_unpublished); error_ == nullptr && future_ != nullptr;
       advance(skip_unpublished)) {
    if (!polling.pause()) continue;
    check_interrupt();
    inner_->check_now();
    look_for_raised_peers();
    if (polling.waited_s() <= options_.timeout_s) continue;
    const std::string text = concat(describe(rank()), " waited ", options_.timeout_s,
                                    " s for the communication hook's future for ",
                                    bucket_name(current_), " in round ", round_);
    inner_->fail(text);
    throw TimeoutError(text +
                       "; does every rank's hook make the same calls? (It gets a bucket only when "
                       "the future for the one before is complete.)");
  }
  wait_s_ += polling.waited_s();
}

std::string HookRound::bucket_name(int unit) const {
  return concat("bucket ", unit, " (", options_.unit_names[unit], ")");
}

std::string HookRound::raised_key(int peer) const { return concat("raised/", round_, "/", peer); }

// The bucket, then the text.
void HookRound::announce_error() {
  store_->set(raised_key(rank()), concat(current_, " ", text_of(error_)));
}

// A peer that raised for this bucket, or one before it, has not come to the call that we wait for.
// One that raised for a later bucket has left it behind, so that ours will be complete.
void HookRound::look_for_raised_peers() {
  for (int r = 0; r < size(); ++r) {
    if (r == rank() || !store_->check(raised_key(r))) continue;
    if (std::atoi(store_->get(raised_key(r)).c_str()) <= current_) give_up(r);
  }
}

void HookRound::give_up(int peer) {
  const std::string what = store_->get(raised_key(peer));
  const std::string reason =
      concat(describe(peer), "'s communication hook raised for ",
             bucket_name(std::atoi(what.c_str())), ": ", what.substr(what.find(' ') + 1));
  inner_->fail(reason);
  throw PeerError(concat(reason, "; it did not raise on ", describe(rank()),
                         ", which raises in round ", round_,
                         ", and its process group cannot be used any more: ", options_.remedy));
}

void HookRound::fail(const std::string& reason) noexcept {
  if (!settled_) inner_->fail(reason);
  settled_ = false;
}

// What the hook has is its process group's affair, which keeps the tensors as long as it needs
// them.
bool HookRound::drain() noexcept {
  future_ = nullptr;
  return inner_->drain();
}

}  // namespace pydist
