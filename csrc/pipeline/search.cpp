// Owns the choice among built-in schedules and the search's.
#include "pipeline/search.h"

#include <limits>
#include <numeric>
#include <optional>
#include <string>
#include <utility>

#include "base/check.h"
#include "pipeline/builders.h"
#include "pipeline/state_search.h"

namespace pydist {

namespace {

// Sums of the same costs in another order differ by this share of them.
constexpr double kRounding = 1e-9;

struct Best {
  std::optional<Schedule> schedule = std::nullopt;
  double makespan = std::numeric_limits<double>::infinity();
  double held = 0.0;
};

bool fits(const Simulation& simulation, const std::vector<double>& cap_nbytes) {
  for (size_t rank = 0; rank < cap_nbytes.size(); ++rank) {
    if (simulation.peak_nbytes[rank] > cap_nbytes[rank] * (1 + kRounding)) return false;
  }
  return true;
}

// In bytes, or in microbatches where the costs have no bytes.
double sum_of_peaks(const Simulation& found) {
  const double nbytes = std::accumulate(found.peak_nbytes.begin(), found.peak_nbytes.end(), 0.0);
  return nbytes > 0.0
             ? nbytes
             : std::accumulate(found.peak_activations.begin(), found.peak_activations.end(), 0.0);
}

void consider(const SearchRequest& request, Schedule schedule, Best* best) {
  const Simulation found = simulate(schedule, request.costs);
  if (!fits(found, request.cap_nbytes)) return;
  const double held = sum_of_peaks(found);
  const double rounding = found.makespan * kRounding;
  const bool is_shorter = found.makespan < best->makespan - rounding;
  const bool is_smaller =
      found.makespan < best->makespan + rounding && held < best->held * (1 - kRounding);
  if (best->schedule && !is_shorter && !is_smaller) return;
  schedule.name = concat("auto: ", schedule.name);
  *best = {std::move(schedule), found.makespan, held};
}

// Those that cannot be had with this many stages or microbatches are left out.
void consider_built_in(const SearchRequest& request, Best* best) {
  for (const std::string& kind : schedule_kinds()) {
    if (kind == "forward-only") continue;
    std::optional<Schedule> schedule;
    try {
      schedule = build_schedule(kind, request.num_ranks, request.num_microbatches,
                                request.stages_per_rank);
    } catch (const ScheduleError&) {
      continue;
    }
    consider(request, std::move(*schedule), best);
  }
}

std::vector<std::vector<int>> placements(const SearchRequest& request) {
  std::vector<std::vector<int>> all{loop_placement(request.num_ranks, request.stages_per_rank)};
  if (request.stages_per_rank == 2) all.push_back(v_placement(request.num_ranks));
  return all;
}

// One microbatch passes all stages of a rank before it comes back through them.
bool fits_one_microbatch(const SearchRequest& request, const std::vector<int>& rank_of_stage,
                         std::string* why_not) {
  for (size_t rank = 0; rank < request.cap_nbytes.size(); ++rank) {
    double nbytes = 0.0;
    for (size_t stage = 0; stage < rank_of_stage.size(); ++stage) {
      const bool is_here = rank_of_stage[stage] == static_cast<int>(rank);
      if (is_here) nbytes += request.costs.nbytes_after_forward[stage];
    }
    if (nbytes <= request.cap_nbytes[rank] * (1 + kRounding)) continue;
    *why_not = concat("memory_cap of rank ", rank, " is ", request.cap_nbytes[rank],
                      " bytes, but one microbatch alone holds ", nbytes,
                      " there: raise it, or make microbatches smaller");
    return false;
  }
  return true;
}

}  // namespace

Schedule find_best_schedule(const SearchRequest& request) {
  // One that takes any numbers that make sense, to refuse others.
  build_schedule("looped-bfs", request.num_ranks, request.num_microbatches,
                 request.stages_per_rank);
  Best best;
  consider_built_in(request, &best);
  std::string why_not;
  for (const std::vector<int>& rank_of_stage : placements(request)) {
    if (!fits_one_microbatch(request, rank_of_stage, &why_not)) continue;
    auto found = search_states(request, rank_of_stage, best.makespan * (1 - kRounding));
    if (found) consider(request, std::move(*found), &best);
  }
  PYDIST_CHECK(best.schedule, ScheduleError, why_not);
  return std::move(*best.schedule);
}

}  // namespace pydist
