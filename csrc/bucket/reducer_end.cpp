// How a round ends: ranks agree on what happened in it, means are delivered, or all give up.
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/clock.h"
#include "base/fork.h"
#include "bucket/reducer.h"

namespace pydist {

void Reducer::close_round() {
  expected_.disarm();
  stats_.close(monotonic_ns());
  settle_round();
}

// No gradient comes any more.
void Reducer::settle_round() {
  if (!shadows_) announce_end();
  if (!shadows_) record_.trainable = trainable();
  record_.whole = by_output_ ? 1 : 0;
  if (round_->publishes_all()) publish_missing(nullptr);
  check_handed();
  record_.busy_ns = shadows_ ? 0 : stats_.busy_ns(monotonic_ns());
  const Bitmap again = marks_.around_agreement([&] { return agree(); });
  publish_missing(&used_by_any_);
  round_->finish();
  marks_.finished();
  if (receives_) deliver(used_by_any_);
  if (again.any()) second_round(again);
  publish_late_ = publish_late_ || (options_.comm_hook && again.any());
  average_sparse();
  if (!receives_) deliver(Bitmap(static_cast<int>(parameters_.size())));  // only puts back
  round_->delivered();
  stats_.finish(monotonic_ns());
  last_ready_order_.swap(ready_order_);
  if (counters_.num_rounds++ == 0) used_first_ = used_by_any_;
  ever_changed_ = ever_changed_ || last_round_changed();
  last_had_unused_ = by_output_ && !unused_in_last_round().empty();
  record_.used.clear();
  record_.again.clear();
  open_ = false;
  for (const auto& action : std::exchange(after_round_, {})) action();
  // Only now, when gradients are the mean and the round is closed on all ranks: each raises the
  // same, and the next step finds nothing half done.
  if (options_.unused_is_error) raise_if_unused();
  run_deferred_hooks();
}

void Reducer::announce_end() {
  if (!before_end_) return;
  const int64_t start_ns = monotonic_ns();
  before_end_();
  stats_.discount(monotonic_ns() - start_ns);
}

// Leaves in used_by_any_ what ranks used; returns what is to be reduced again. Where this rank used
// all that it could, nothing that the others tell could change what it does now.
Bitmap Reducer::agree() {
  const std::string why = round_->answers_late() ? why_answer_is_needed() : "";
  PYDIST_CHECK(why.empty() || round_->may_wait(), UsageError, why, ", so that ", options_.name,
               " has to ask the other ranks, which cannot be captured in a CUDA graph; use every "
               "trainable parameter once in a captured step, or freeze those that it does not use");
  if (why.empty() && round_->end_unanswered(record_)) {
    used_by_any_ = record_.used;
    return record_.again;
  }
  const std::vector<RoundRecord>& answer = round_->end(record_);
  std::vector<RoundRecord> kept;
  if (round_->answers_late()) {  // those of rounds before, first
    kept = answer;
    read_late_records();
  }
  const std::vector<RoundRecord>& records = round_->answers_late() ? kept : answer;
  note_use(records);
  if (!round_->answers_late()) note_meeting(records);
  check_trainable(records);
  if (!shadows_) agreed_trainable_ = record_.trainable;
  if (round_->answers_late()) check_again(records);
  Bitmap again(static_cast<int>(parameters_.size()));
  used_by_any_.clear();
  for (const RoundRecord& record : records) {
    used_by_any_.merge(record.used);
    again.merge(record.again);
  }
  return again;
}

// Empty where it is not.
std::string Reducer::why_answer_is_needed() const {
  if (shadows_) return "this rank takes part in the others' backward";
  if (options_.unused_is_error) return "unused_parameters is \"error\"";
  // Else a rank alone in freezing one would give zeros that nobody wants.
  if (!(record_.trainable == agreed_trainable_)) return "parameters were frozen or unfrozen";
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const Parameter& parameter = parameters_[i];
    const int index = static_cast<int>(i);
    if (is_expected(parameter) && !record_.used.test(index)) {
      return concat("parameter ", parameter.name, " was not used");
    }
    if (record_.again.test(index)) {
      return concat("parameter ", parameter.name, " got two gradients in one backward");
    }
  }
  return "";
}

// Each rank finds the same in them, if not in the same step.
void Reducer::read_late_records() {
  while (const std::vector<RoundRecord>* records = round_->late_records()) {
    note_use(*records);
    try {
      check_trainable(*records);
    } catch (const MismatchError& error) {
      last_error_ = error.what();
      round_->fail(error.what());
      throw;
    }
  }
}

void Reducer::note_use(const std::vector<RoundRecord>& records) {
  last_used_.clear();
  for (const RoundRecord& record : records) {
    last_used_.push_back(record.used);
    // Of a part of a backward we cannot tell what was left out.
    if (record.whole == 0) last_used_.back().merge(record.trainable);
    if (record.shadows()) last_used_.back().fill();
  }
}

void Reducer::note_meeting(const std::vector<RoundRecord>& records) {
  std::vector<int64_t> busy_ns;
  // A rank that only shadows the round counts as the first of the others to come.
  uint64_t shortest_ns = UINT64_MAX;
  for (const RoundRecord& record : records) {
    if (!record.shadows()) shortest_ns = std::min(shortest_ns, record.busy_ns);
  }
  for (const RoundRecord& record : records) {
    busy_ns.push_back(static_cast<int64_t>(record.shadows() ? shortest_ns : record.busy_ns));
  }
  stats_.meet(monotonic_ns(), round_->rank(), busy_ns);
}

// Ranks that had a second gradient give it, the others zeros; `again` is the same on all ranks, so
// all reduce the same units.
void Reducer::second_round(const Bitmap& again) {
  const at::NoGradGuard no_grad;
  std::vector<std::pair<int, at::Tensor>> firsts;
  round_->begin_second(round_divisor_);
  for (size_t u = 0; u < units_.size(); ++u) {
    const auto& members = units_[u].members;
    if (std::none_of(members.begin(), members.end(),
                     [&](const Member& member) { return again.test(member.parameter); })) {
      continue;
    }
    const int unit = static_cast<int>(u);
    firsts.emplace_back(unit, options_.bucket_view ? bucket_of(unit).clone() : at::Tensor());
    pack_unit(unit, true);
    round_->publish(unit, round_->unit_memory(unit));
  }
  if (!round_->end_unanswered(record_)) round_->end(record_);
  round_->finish();
  if (!receives_) return;
  for (const auto& [unit, first] : firsts) add_second(unit, again, first);
}

void Reducer::shadow_round(int divisor, bool receives) {
  PYDIST_CHECK(!open_, UsageError, "a rank in the middle of a backward of ", options_.name,
               " cannot shadow a round of the others");
  RoundRecord kept(static_cast<int>(parameters_.size()));
  std::swap(kept, record_);  // what was used since the last round that was this rank's own
  shadows_ = true;
  receives_ = receives;
  const auto leave = [&] {
    shadows_ = false;
    receives_ = true;
    std::swap(kept, record_);
  };
  try {
    begin_round(divisor);
    by_output_ = true;
    close_round();
  } catch (...) {
    if (open_) abandon_round("raised while it shadowed a backward");
    leave();
    throw;
  }
  leave();
}

void Reducer::abandon_round(const std::string& reason) noexcept {
  drop_round(concat(round_->describe(round_->rank()), " ", reason, " of ", options_.name));
}

void Reducer::drop_round(const std::string& reason) noexcept {
  marks_.finished();
  expected_.disarm();
  open_ = false;
  if (in_forked_child()) return;
  round_->fail(reason);
  release_pins(round_->drain());
  for (Parameter& parameter : parameters_) {
    if (parameter.aside.defined()) parameter.variable.mutable_grad() = std::move(parameter.aside);
    parameter.aside = at::Tensor();
    parameter.is_aside = false;
  }
  record_.used.clear();
  record_.again.clear();
}

void Reducer::release_pins(bool quiet) noexcept {
  for (UnitState& state : states_) {
    // Where a peer might still write, the block stays pinned for ever.
    if (state.in_place != nullptr && quiet) round_->unpin(state.in_place);
    state.in_place = nullptr;
    state.storage = c10::Storage();
  }
}

}  // namespace pydist
