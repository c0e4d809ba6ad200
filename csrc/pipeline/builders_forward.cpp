// Forwards alone, for any placement: what evaluation and inference run.
#include <utility>

#include "pipeline/builders.h"
#include "pipeline/readiness.h"

namespace pydist {

namespace {

// Works in steps of one forward a rank.
class ForwardSteps {
 public:
  explicit ForwardSteps(Schedule* schedule)
      : schedule_(*schedule), done_(schedule_.rank_of_stage.size(), 0) {}

  void run() {
    for (size_t left = done_.size() * static_cast<size_t>(schedule_.num_microbatches); left > 0;) {
      const std::vector<int> done_before = done_;
      std::vector<bool> is_taken(schedule_.actions.size(), false);
      // The last stages first: they are nearest to the end.
      for (int stage = schedule_.num_stages() - 1; stage >= 0; --stage) {
        const int rank = schedule_.rank_of_stage[stage];
        if (is_taken[rank] || !may_run(stage, done_before)) continue;
        schedule_.actions[rank].push_back({Action{stage, ActionKind::kForward, done_[stage]++}});
        is_taken[rank] = true;
        --left;
      }
    }
  }

 private:
  bool may_run(int stage, const std::vector<int>& done) const {
    const Action action{stage, ActionKind::kForward, done[stage]};
    if (action.microbatch == schedule_.num_microbatches) return false;
    for (const StageValue& value : needs_of(action, schedule_.num_stages())) {
      if (done[value.stage] <= action.microbatch) return false;
    }
    return true;
  }

  Schedule& schedule_;
  std::vector<int> done_;  // forwards, by stage
};

}  // namespace

Schedule build_forward_only(std::vector<int> rank_of_stage, int num_microbatches) {
  int num_ranks = 0;
  for (const int rank : rank_of_stage) num_ranks = std::max(num_ranks, rank + 1);
  Schedule schedule{"forward-only", num_microbatches, std::move(rank_of_stage), {}};
  schedule.actions.resize(static_cast<size_t>(num_ranks));
  ForwardSteps(&schedule).run();
  return schedule;
}

}  // namespace pydist
