// "auto": the best schedule for given costs and a limit of memory. Pure.
#pragma once

#include <vector>

#include "pipeline/schedule.h"
#include "pipeline/simulator.h"

namespace pydist {

struct SearchRequest {
  int num_ranks = 1;
  int num_microbatches = 1;
  int stages_per_rank = 1;
  Costs costs = {};
  // What activations and kept gradients may take, by rank; empty: anything.
  std::vector<double> cap_nbytes = {};
};

// The shortest, by the simulator, of all built-in schedules with this many stages a rank that stay
// under the cap, and of what a search finds (state_search.h). Of equally short ones the one that
// holds least, and a built-in one rather than one that was searched for. Its name says which it is.
//
// Raises ScheduleError where even one microbatch at a time is above the cap.
Schedule find_best_schedule(const SearchRequest& request);

}  // namespace pydist
