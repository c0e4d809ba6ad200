// Searches all orders of F, B, I and W for the shortest schedule of given stages: branch and bound
// over what has been done so far, narrowed to the most promising where there is too much. Pure.
//
// A state is how many F, B or I, and B or W each stage has done, when each rank is free, and when
// the values that are still wanted arrive. Within a stage each kind runs in ascending order of
// microbatches, and B only where no W is outstanding, so that gradients are added in that order.
// From a state, every next action of every rank leads to another one; layer by layer, by the work
// that is done:
//
//   layer 0        nothing done
//   layer 1        after one F
//   ...            I, W and F one layer further, B two
//   layer 3 S m    everything done
//
// Actions are added in the order in which they start, so no time lies before the last start. A
// state goes where another one has done the same and is nowhere later, and where even a lower
// bound of its makespan is no better than the best known. If no layer is narrowed, what is left at
// the end is a shortest schedule.
#pragma once

#include <optional>
#include <vector>

#include "pipeline/schedule.h"
#include "pipeline/search.h"

namespace pydist {

// A schedule shorter than `below` that stays under the cap; nothing where none was found.
std::optional<Schedule> search_states(const SearchRequest& request,
                                      const std::vector<int>& rank_of_stage, double below);

}  // namespace pydist
