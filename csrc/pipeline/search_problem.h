// What does not change during a search: stages, costs and cap, and the bounds that follow. Pure.
#pragma once

#include <vector>

#include "pipeline/schedule.h"
#include "pipeline/search.h"
#include "pipeline/simulator.h"

namespace pydist {

// What a stage has done: so many of its microbatches, in ascending order.
struct Done {
  int forward = 0;      // F
  int backward = 0;     // B or I
  int accumulated = 0;  // B or W
  bool operator==(const Done& other) const {
    return forward == other.forward && backward == other.backward &&
           accumulated == other.accumulated;
  }
};

class SearchProblem {
 public:
  // The request must outlive it.
  SearchProblem(const SearchRequest& request, const std::vector<int>& rank_of_stage);

  const Schedule& empty() const { return schedule_; }
  const Costs& costs() const { return costs_; }
  int num_stages() const { return schedule_.num_stages(); }
  int num_ranks() const { return schedule_.num_ranks(); }
  int num_microbatches() const { return schedule_.num_microbatches; }
  int num_layers() const { return 3 * num_stages() * num_microbatches(); }
  int rank_of(int stage) const { return schedule_.rank_of_stage[stage]; }
  const std::vector<int>& stages_of(int rank) const { return stages_of_[rank]; }

  double travel(int from_stage, int to_stage) const {
    return rank_of(from_stage) == rank_of(to_stage) ? 0.0 : costs_.communication;
  }

  // What the rank has still to do, at least.
  double work_left(const std::vector<Done>& done, int rank) const;

  // From now on, until the stage's last microbatch has gone to the last stage and come back to the
  // first; at least.
  double way_left(const Done& done, int stage) const;

  // Whether the rank's memory is enough, and will be enough for the oldest microbatch to go on.
  bool fits(const std::vector<Done>& done, int rank) const;

 private:
  void plan_ways();

  Schedule schedule_;
  const Costs& costs_;
  const std::vector<double>& cap_nbytes_;
  std::vector<std::vector<int>> stages_of_;  // by rank, ascending
  std::vector<double> whole_;                // by stage: B, or I and W
  std::vector<double> back_;                 // by stage: until the input gradient is there
  std::vector<double> way_down_;  // by stage: from its B or I of a microbatch to the end at stage 0
  std::vector<double> way_up_;    // by stage: from its F to the last stage and back to stage 0
};

}  // namespace pydist
