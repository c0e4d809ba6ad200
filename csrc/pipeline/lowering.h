// What one rank does in a step: its actions, each with what it receives and sends. Pure.
#pragma once

#include <optional>
#include <vector>

#include "pipeline/schedule.h"

namespace pydist {

// Neither received nor sent.
constexpr int kNoRank = -1;

struct PlannedAction {
  Action action;
  // Where the value of the neighbouring stage comes from: F from the previous stage, B and I from
  // the next. The rank's own number: handed over here, without a message. kNoRank: it needs none.
  int receives_from = kNoRank;
  // Where what it gives goes: of F to the next stage, of B and I to the previous.
  int sends_to = kNoRank;
  // The stage's last B or W of the step: afterwards its gradients are complete.
  bool completes_gradients = false;
};

// One place in the list: an action or an overlapped pair.
struct Step {
  PlannedAction first;
  std::optional<PlannedAction> second = std::nullopt;
};

std::vector<Step> lower(const Schedule& schedule, int rank);

}  // namespace pydist
