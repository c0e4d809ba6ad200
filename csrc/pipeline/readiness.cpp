// Owns the rule of what an action needs, and the walk through a schedule that follows from it.
#include "pipeline/readiness.h"

#include <algorithm>

namespace pydist {

Needs needs_of(const Action& action, int num_stages) {
  const int stage = action.stage;
  const int microbatch = action.microbatch;
  Needs needs;
  const auto add = [&](StageValueKind kind, int of_stage) {
    needs.values[static_cast<size_t>(needs.size++)] = {kind, of_stage, microbatch};
  };
  switch (action.kind) {
    case ActionKind::kForward:
      if (stage > 0) add(StageValueKind::kOutput, stage - 1);
      break;
    case ActionKind::kBackward:
    case ActionKind::kInput:
      add(StageValueKind::kOutput, stage);
      if (stage + 1 < num_stages) add(StageValueKind::kInputGradient, stage + 1);
      break;
    case ActionKind::kWeight:
      add(StageValueKind::kInputGradient, stage);
      break;
  }
  return needs;
}

std::optional<StageValue> given_by(const Action& action) {
  switch (action.kind) {
    case ActionKind::kForward:
      return StageValue{StageValueKind::kOutput, action.stage, action.microbatch};
    case ActionKind::kBackward:
    case ActionKind::kInput:
      return StageValue{StageValueKind::kInputGradient, action.stage, action.microbatch};
    case ActionKind::kWeight:
      break;
  }
  return std::nullopt;
}

std::vector<int> visit_in_order(const Schedule& schedule, const VisitEntry& visit) {
  ByStageValue<char> is_there(schedule, false);
  std::vector<int> next(schedule.actions.size(), 0);
  const auto may_start = [&](const Entry& entry) {
    bool may = true;
    for_each_action(entry, [&](const Action& action) {
      const Needs needs = needs_of(action, schedule.num_stages());
      may = may && std::all_of(needs.begin(), needs.end(),
                               [&](const StageValue& value) { return is_there[value] != 0; });
    });
    return may;
  };
  for (bool progressed = true; progressed;) {
    progressed = false;
    for (int rank = 0; rank < schedule.num_ranks(); ++rank) {
      const std::vector<Entry>& entries = schedule.actions[rank];
      int& index = next[rank];
      for (; index < static_cast<int>(entries.size()) && may_start(entries[index]); ++index) {
        visit(Place{rank, index}, entries[index]);
        for_each_action(entries[index], [&](const Action& action) {
          if (const auto value = given_by(action)) is_there[*value] = true;
        });
        progressed = true;
      }
    }
  }
  return next;
}

}  // namespace pydist
