// What can be asked of a schedule as data.
#include "pipeline/schedule.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace pydist {

namespace {

// More than any schedule has; keeps a wrong digit from asking for all of the memory.
constexpr int kMaxStages = 1 << 20;

}  // namespace

int Schedule::num_stages_on(int rank) const {
  return static_cast<int>(std::count(rank_of_stage.begin(), rank_of_stage.end(), rank));
}

Schedule schedule_of(std::string name, std::vector<std::vector<Entry>> actions) {
  Schedule schedule{std::move(name), 0, {}, std::move(actions)};
  for (int rank = 0; rank < schedule.num_ranks(); ++rank) {
    for (const Entry& entry : schedule.actions[rank]) {
      for_each_action(entry, [&](const Action& action) {
        PYDIST_CHECK(action.stage < kMaxStages && action.microbatch < kMaxStages, ScheduleError,
                     "action ", action.text(), " on rank ", rank, ": at most ", kMaxStages,
                     " stages and microbatches are possible");
        const size_t stage = static_cast<size_t>(action.stage);
        if (schedule.rank_of_stage.size() <= stage) schedule.rank_of_stage.resize(stage + 1, -1);
        if (schedule.rank_of_stage[stage] < 0) schedule.rank_of_stage[stage] = rank;
        schedule.num_microbatches = std::max(schedule.num_microbatches, action.microbatch + 1);
      });
    }
  }
  for (int stage = 0; stage < schedule.num_stages(); ++stage) {
    PYDIST_CHECK(schedule.rank_of_stage[stage] >= 0, ScheduleError, "schedule '", schedule.name,
                 "' has actions of stage ", schedule.num_stages() - 1, " but none of stage ", stage,
                 ": stages are numbered from 0 without gaps");
  }
  return schedule;
}

}  // namespace pydist
