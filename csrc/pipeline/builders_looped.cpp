// Schedules whose stages go round the ranks, with whole backwards: gpipe, looped-bfs, 1f1b,
// interleaved-1f1b. Definitions: GPipe (Huang et al. 2019), 1F1B (PipeDream-Flush, Narayanan et al.
// 2021a), interleaved (Narayanan et al. 2021b), breadth-first (Lamy-Poirier 2023).
#include <algorithm>

#include "pipeline/builder_kinds.h"

namespace pydist {

namespace {

// Groups of one pass over a rank's stages. As many as there are whole numbers of ranks in the
// microbatches, and of equal size but for one microbatch: a last group that is merely shorter than
// the others would deadlock or wait (with 4 ranks, 5 microbatches and 3 stages a rank, say).
std::vector<int> group_sizes(const PipelineShape& shape) {
  const int num_groups = std::max(1, shape.num_microbatches / shape.num_ranks);
  std::vector<int> sizes(static_cast<size_t>(num_groups), shape.num_microbatches / num_groups);
  for (int i = 0; i < shape.num_microbatches % num_groups; ++i) ++sizes[i];
  return sizes;
}

std::vector<Entry> merge(const std::vector<Action>& forwards, const std::vector<Action>& backwards,
                         int num_warm_up) {
  std::vector<Entry> entries;
  size_t next_forward = 0;
  for (; next_forward < forwards.size() && static_cast<int>(next_forward) < num_warm_up;
       ++next_forward) {
    entries.push_back({forwards[next_forward]});
  }
  for (const Action& backward : backwards) {
    if (next_forward < forwards.size()) entries.push_back({forwards[next_forward++]});
    entries.push_back({backward});
  }
  return entries;
}

}  // namespace

int largest_group(const PipelineShape& shape) { return group_sizes(shape).front(); }

// Group by group: all microbatches of it through the rank's first stage (for backwards, the last),
// then all through the next.
std::vector<Action> grouped_actions(const PipelineShape& shape, int rank, ActionKind kind) {
  std::vector<Action> actions;
  const int num_stages = shape.stages_per_rank;
  int begin = 0;
  for (const int size : group_sizes(shape)) {
    for (int i = 0; i < num_stages; ++i) {
      const int nth = kind == ActionKind::kForward ? i : num_stages - 1 - i;
      for (int microbatch = begin; microbatch < begin + size; ++microbatch) {
        actions.push_back({nth * shape.num_ranks + rank, kind, microbatch});
      }
    }
    begin += size;
  }
  return actions;
}

std::vector<Entry> gpipe(const PipelineShape& shape, int rank) {
  std::vector<Entry> entries;
  const auto add = [&](int nth, ActionKind kind) {
    for (int microbatch = 0; microbatch < shape.num_microbatches; ++microbatch) {
      entries.push_back({Action{nth * shape.num_ranks + rank, kind, microbatch}});
    }
  };
  for (int nth = 0; nth < shape.stages_per_rank; ++nth) add(nth, ActionKind::kForward);
  for (int nth = shape.stages_per_rank - 1; nth >= 0; --nth) add(nth, ActionKind::kBackward);
  return entries;
}

std::vector<Entry> one_forward_one_backward(const PipelineShape& shape, int rank) {
  return merge(grouped_actions(shape, rank, ActionKind::kForward),
               grouped_actions(shape, rank, ActionKind::kBackward), shape.num_ranks - 1 - rank);
}

// Twice the distance to the last rank: with once, a rank's second stage would wait for its input.
std::vector<Entry> interleaved_1f1b(const PipelineShape& shape, int rank) {
  const int num_warm_up =
      (shape.stages_per_rank - 1) * largest_group(shape) + 2 * (shape.num_ranks - 1 - rank);
  return merge(grouped_actions(shape, rank, ActionKind::kForward),
               grouped_actions(shape, rank, ActionKind::kBackward), num_warm_up);
}

}  // namespace pydist
