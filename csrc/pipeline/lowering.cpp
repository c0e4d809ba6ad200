// Owns the pass that adds messages to a rank's actions.
#include "pipeline/lowering.h"

#include "pipeline/readiness.h"

namespace pydist {

namespace {

// The stage that uses what the action gives, other than itself; out of range: nobody.
int user_of(const Action& action) {
  return action.kind == ActionKind::kForward ? action.stage + 1 : action.stage - 1;
}

PlannedAction plan(const Schedule& schedule, const Action& action) {
  PlannedAction planned{action};
  for (const StageValue& value : needs_of(action, schedule.num_stages())) {
    if (value.stage != action.stage) planned.receives_from = schedule.rank_of_stage[value.stage];
  }
  const int user = user_of(action);
  if (given_by(action) && user >= 0 && user < schedule.num_stages()) {
    planned.sends_to = schedule.rank_of_stage[user];
  }
  return planned;
}

}  // namespace

std::vector<Step> lower(const Schedule& schedule, int rank) {
  std::vector<Step> steps;
  for (const Entry& entry : schedule.actions[rank]) {
    Step step{plan(schedule, entry.first)};
    if (entry.second) step.second = plan(schedule, *entry.second);
    steps.push_back(step);
  }
  std::vector<bool> is_complete(schedule.rank_of_stage.size(), false);
  const auto mark = [&](PlannedAction& planned) {
    if (!accumulates(planned.action) || is_complete[planned.action.stage]) return;
    planned.completes_gradients = is_complete[planned.action.stage] = true;
  };
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    if (step->second) mark(*step->second);
    mark(step->first);
  }
  return steps;
}

}  // namespace pydist
