// Owns the table of built-in schedules and the checks of what they are asked for.
#include "pipeline/builders.h"

#include <utility>

#include "base/check.h"
#include "pipeline/builder_kinds.h"

namespace pydist {

namespace {

constexpr int kAny = 0;
constexpr int64_t kMaxActions = int64_t{1} << 26;

using BuildRank = std::vector<Entry> (*)(const PipelineShape& shape, int rank);

struct Kind {
  const char* name;
  int stages_per_rank;  // that it needs; kAny
  int default_stages_per_rank;
  BuildRank build_rank;      // null: forward-only
  const char* instead = "";  // for another number of stages
};

// looped-bfs is gpipe with more stages; both go through all microbatches of a stage at a time.
const Kind kKinds[] = {
    {"gpipe", 1, 1, gpipe, "; 'looped-bfs' is the same with any number"},
    {"1f1b", 1, 1, one_forward_one_backward, "; 'interleaved-1f1b' takes any number"},
    {"zb-h1", 1, 1, zb_h1, "; 'interleaved-zb' takes any number, 'zb-v' takes 2"},
    {"zb-h2", 1, 1, zb_h2, "; 'interleaved-zb' takes any number, 'zb-v' takes 2"},
    {"looped-bfs", kAny, 1, gpipe},
    {"interleaved-1f1b", kAny, 2, interleaved_1f1b},
    {"interleaved-zb", kAny, 2, interleaved_zb},
    {"zb-v", 2, 2, zb_v, "; 'zb-h1' takes 1, 'interleaved-zb' any number"},
    {"dualpipe-v", 2, 2, dualpipe_v, "; 'zb-h1' takes 1, 'interleaved-zb' any number"},
    {"forward-only", kAny, 1, nullptr},
};

const Kind& find_kind(const std::string& name) {
  std::string known;
  for (const Kind& kind : kKinds) {
    if (kind.name == name) return kind;
    known += concat(known.empty() ? "'" : ", '", kind.name, "'");
  }
  throw ScheduleError(concat("no schedule is called '", name, "'; there are ", known,
                             ", and what schedule.register() has added"));
}

bool is_v(const Kind& kind) { return kind.build_rank == zb_v || kind.build_rank == dualpipe_v; }

void check_arguments(const Kind& kind, const PipelineShape& shape) {
  PYDIST_CHECK(shape.num_ranks >= 1, ScheduleError, "num_ranks is ", shape.num_ranks,
               ", expected 1 or more");
  PYDIST_CHECK(shape.num_microbatches >= 1, ScheduleError, "num_microbatches is ",
               shape.num_microbatches, ", expected 1 or more");
  PYDIST_CHECK(shape.stages_per_rank >= 1, ScheduleError, "stages_per_rank is ",
               shape.stages_per_rank, ", expected 1 or more");
  PYDIST_CHECK(kind.stages_per_rank == kAny || kind.stages_per_rank == shape.stages_per_rank,
               ScheduleError, "schedule '", kind.name, "' has ", kind.stages_per_rank,
               kind.stages_per_rank == 1 ? " stage" : " stages", " on each rank, not ",
               shape.stages_per_rank, kind.instead);
  PYDIST_CHECK(kind.build_rank != dualpipe_v || shape.num_microbatches >= 2 * shape.num_ranks,
               ScheduleError, "schedule 'dualpipe-v' needs at least twice as many microbatches as ",
               "ranks: num_microbatches is ", shape.num_microbatches, ", expected ",
               2 * shape.num_ranks, " or more for ", shape.num_ranks,
               " ranks; 'zb-v' takes any number");
  // One factor at a time, so that the product cannot overflow.
  int64_t num_actions = int64_t{3} * shape.num_ranks;
  for (const int factor : {shape.num_microbatches, shape.stages_per_rank}) {
    num_actions *= num_actions <= kMaxActions ? factor : 1;
  }
  PYDIST_CHECK(num_actions <= kMaxActions, ScheduleError, "schedule '", kind.name, "' with ",
               shape.num_ranks, " ranks, ", shape.num_microbatches, " microbatches and ",
               shape.stages_per_rank, " stages on each rank would have more than ", kMaxActions,
               " actions");
}

}  // namespace

std::vector<std::string> schedule_kinds() {
  std::vector<std::string> names;
  for (const Kind& kind : kKinds) names.emplace_back(kind.name);
  return names;
}

int default_stages_per_rank(const std::string& kind) {
  return find_kind(kind).default_stages_per_rank;
}

std::vector<int> loop_placement(int num_ranks, int stages_per_rank) {
  std::vector<int> rank_of_stage;
  for (int stage = 0; stage < num_ranks * stages_per_rank; ++stage) {
    rank_of_stage.push_back(stage % num_ranks);
  }
  return rank_of_stage;
}

std::vector<int> v_placement(int num_ranks) {
  std::vector<int> rank_of_stage;
  for (int rank = 0; rank < num_ranks; ++rank) rank_of_stage.push_back(rank);
  for (int rank = num_ranks - 1; rank >= 0; --rank) rank_of_stage.push_back(rank);
  return rank_of_stage;
}

Schedule build_schedule(const std::string& name, int num_ranks, int num_microbatches,
                        int stages_per_rank) {
  const Kind& kind = find_kind(name);
  const PipelineShape shape{num_ranks, num_microbatches, stages_per_rank};
  check_arguments(kind, shape);
  auto placement = is_v(kind) ? v_placement(num_ranks) : loop_placement(num_ranks, stages_per_rank);
  if (kind.build_rank == nullptr) return build_forward_only(std::move(placement), num_microbatches);
  Schedule schedule{name, num_microbatches, std::move(placement), {}};
  for (int rank = 0; rank < num_ranks; ++rank) {
    schedule.actions.push_back(kind.build_rank(shape, rank));
  }
  return schedule;
}

}  // namespace pydist
