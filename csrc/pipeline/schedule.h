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
  int num_stages_on(int rank) const;
};

// Where in a schedule an entry stands.
struct Place {
  int rank = 0;
  int index = 0;
  bool operator==(const Place& other) const { return rank == other.rank && index == other.index; }
};

// Calls visit(action) for the action, or for both of an overlapped pair.
template <class Visit>
void for_each_action(const Entry& entry, Visit visit) {
  visit(entry.first);
  if (entry.second) visit(*entry.second);
}

// A schedule from its actions alone: as many microbatches as they name, and each stage on the
// first rank that has an action of it. Where that is not so, the validator says it.
Schedule schedule_of(std::string name, std::vector<std::vector<Entry>> actions);

}  // namespace pydist
