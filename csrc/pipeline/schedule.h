// A schedule is data: for each rank, the actions that it takes in one step, in order. Pure.
#pragma once

#include <string>
#include <vector>

#include "base/error.h"
#include "pipeline/action.h"

namespace pydist {

// A schedule that cannot be built, read or run; says where.
class ScheduleError : public Error {
 public:
  using Error::Error;
};

struct Schedule {
  std::string name;
  int num_microbatches = 0;
  std::vector<int> rank_of_stage;           // placement
  std::vector<std::vector<Entry>> actions;  // by rank

  int num_ranks() const { return static_cast<int>(actions.size()); }
  int num_stages() const { return static_cast<int>(rank_of_stage.size()); }
};

}  // namespace pydist
