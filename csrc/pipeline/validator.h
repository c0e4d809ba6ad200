// Whether a schedule can run, and what it then promises. Pure.
//
// Messages are matched by what they are and no buffer is too small (channel.h), so a schedule runs
// to its end exactly if every action is there once, on the rank of its stage, and the order of
// lists together with what actions need has no circle.
#pragma once

#include <vector>

#include "pipeline/schedule.h"

namespace pydist {

struct Validity {
  bool has_backward = false;  // false: a schedule of forwards alone
  // By stage: whether its B and W run in ascending order of microbatches, and its B and I too,
  // which makes sums of gradients bit-equal to those of one process that goes through the
  // microbatches. I counts as what cannot be cut gets its gradients there (backward_cut.h).
  std::vector<bool> accumulates_in_order = {};
};

// Raises ScheduleError: what is missing, twice, misplaced or out of order, or the smallest circle
// of actions that wait for each other, and the lists with the place marked.
Validity validate(const Schedule& schedule);

}  // namespace pydist
