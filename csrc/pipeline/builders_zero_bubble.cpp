// Schedules that split the backward and fill waits with W: zb-h1, zb-h2 (Qi et al. 2023, "Zero
// Bubble Pipeline Parallelism"), and zb-h1's rule over interleaved stages.
#include "pipeline/builder_kinds.h"

namespace pydist {

namespace {

// Forwards to warm up; then the next F, the next I, and once `weight_delay` I have run also the
// oldest W; at last the W that are left.
std::vector<Entry> with_weights_late(const PipelineShape& shape, int rank, int num_warm_up,
                                     int weight_delay) {
  const auto forwards = grouped_actions(shape, rank, ActionKind::kForward);
  const auto inputs = grouped_actions(shape, rank, ActionKind::kInput);
  const auto weights = grouped_actions(shape, rank, ActionKind::kWeight);
  std::vector<Entry> entries;
  size_t next_forward = 0;
  size_t next_weight = 0;
  while (next_forward < forwards.size() && static_cast<int>(next_forward) < num_warm_up) {
    entries.push_back({forwards[next_forward++]});
  }
  for (size_t k = 0; k < inputs.size(); ++k) {
    if (next_forward < forwards.size()) entries.push_back({forwards[next_forward++]});
    entries.push_back({inputs[k]});
    if (static_cast<int>(k) >= weight_delay) entries.push_back({weights[next_weight++]});
  }
  while (next_weight < weights.size()) entries.push_back({weights[next_weight++]});
  return entries;
}

}  // namespace

std::vector<Entry> zb_h1(const PipelineShape& shape, int rank) {
  return with_weights_late(shape, rank, shape.num_ranks - 1 - rank, rank);
}

std::vector<Entry> zb_h2(const PipelineShape& shape, int rank) {
  return with_weights_late(shape, rank, 2 * (shape.num_ranks - 1 - rank), 2 * rank);
}

std::vector<Entry> interleaved_zb(const PipelineShape& shape, int rank) {
  const int earlier_stages = (shape.stages_per_rank - 1) * largest_group(shape);
  return with_weights_late(shape, rank, earlier_stages + shape.num_ranks - 1 - rank, rank);
}

}  // namespace pydist
