// The built-in schedules, by name. Pure.
#pragma once

#include <string>
#include <vector>

#include "pipeline/schedule.h"

namespace pydist {

// All names that build() takes.
std::vector<std::string> schedule_kinds();

// How many stages a rank gets where nobody says: 2 for interleaved and V kinds, else 1.
int default_stages_per_rank(const std::string& kind);

// Raises ScheduleError, which says what would work.
Schedule build_schedule(const std::string& kind, int num_ranks, int num_microbatches,
                        int stages_per_rank);

// Forwards alone, as early as they may, for stages that are placed already.
Schedule build_forward_only(std::vector<int> rank_of_stage, int num_microbatches);

// Placements. Loop: stage s on rank s mod p. V: there and back, two stages on each rank.
std::vector<int> loop_placement(int num_ranks, int stages_per_rank);
std::vector<int> v_placement(int num_ranks);

}  // namespace pydist
