// Owns the lower bounds of what a state still costs, and the rule of what fits into memory.
#include "pipeline/search_problem.h"

#include <algorithm>

namespace pydist {

namespace {

// Sums of the same bytes in another order differ by this share of them.
constexpr double kRounding = 1e-9;

}  // namespace

SearchProblem::SearchProblem(const SearchRequest& request, const std::vector<int>& rank_of_stage)
    : costs_(request.costs), cap_nbytes_(request.cap_nbytes) {
  schedule_.name = "search";
  schedule_.num_microbatches = request.num_microbatches;
  schedule_.rank_of_stage = rank_of_stage;
  schedule_.actions.resize(static_cast<size_t>(request.num_ranks));
  stages_of_.resize(schedule_.actions.size());
  for (int stage = 0; stage < num_stages(); ++stage) {
    stages_of_[rank_of_stage[stage]].push_back(stage);
  }
  for (int stage = 0; stage < num_stages(); ++stage) {
    whole_.push_back(std::min(costs_.backward[stage], costs_.input[stage] + costs_.weight[stage]));
    back_.push_back(std::min(costs_.backward[stage], costs_.input[stage]));
  }
  plan_ways();
}

double SearchProblem::work_left(const std::vector<Done>& done, int rank) const {
  double work = 0.0;
  for (const int stage : stages_of_[rank]) {
    work += (num_microbatches() - done[stage].forward) * costs_.forward[stage] +
            (num_microbatches() - done[stage].backward) * whole_[stage] +
            (done[stage].backward - done[stage].accumulated) * costs_.weight[stage];
  }
  return work;
}

double SearchProblem::way_left(const Done& done, int stage) const {
  const int forwards = num_microbatches() - done.forward;
  const int backwards = num_microbatches() - done.backward;
  if (backwards == 0) return 0.0;
  const double through_here =
      forwards * costs_.forward[stage] + backwards * back_[stage] + way_down_[stage];
  if (forwards == 0) return through_here;
  return std::max(through_here, forwards * costs_.forward[stage] + way_up_[stage]);
}

bool SearchProblem::fits(const std::vector<Done>& done, int rank) const {
  if (cap_nbytes_.empty()) return true;
  const int oldest = done[stages_of_[rank].front()].backward;
  double nbytes = 0.0;
  for (const int stage : stages_of_[rank]) {
    const Done& here = done[stage];
    nbytes += (here.forward - here.backward) * costs_.nbytes_after_forward[stage] +
              (here.backward - here.accumulated) * costs_.nbytes_after_input[stage];
    const bool is_under_way = done[stages_of_[rank].front()].forward > oldest;
    if (is_under_way && here.forward <= oldest) nbytes += costs_.nbytes_after_forward[stage];
  }
  return nbytes <= cap_nbytes_[rank] * (1 + kRounding);
}

void SearchProblem::plan_ways() {
  const int last = num_stages() - 1;
  way_down_.assign(schedule_.rank_of_stage.size(), 0.0);
  way_up_ = way_down_;
  for (int stage = 1; stage <= last; ++stage) {
    const double before = stage == 1 ? whole_[0] : back_[stage - 1] + way_down_[stage - 1];
    way_down_[stage] = travel(stage, stage - 1) + before;
  }
  way_up_[last] = (last == 0 ? whole_[0] : back_[last]) + way_down_[last];
  for (int stage = last - 1; stage >= 0; --stage) {
    way_up_[stage] = travel(stage, stage + 1) + costs_.forward[stage + 1] + way_up_[stage + 1];
  }
}

}  // namespace pydist
