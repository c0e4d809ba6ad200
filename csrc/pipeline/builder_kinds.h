// One function for each built-in schedule; builders.h checks the arguments first. Pure.
//
// What ranks do without a W of their own is a list of forwards and a list of backwards, merged:
// some forwards to warm up, then one of each in turn, then the backwards that are left.
#pragma once

#include <vector>

#include "pipeline/schedule.h"

namespace pydist {

struct PipelineShape {
  int num_ranks = 1;
  int num_microbatches = 1;
  int stages_per_rank = 1;
};

// One rank's actions of one kind, in order.
std::vector<Action> grouped_actions(const PipelineShape& shape, int rank, ActionKind kind);
// Microbatches of the largest group.
int largest_group(const PipelineShape& shape);

std::vector<Entry> gpipe(const PipelineShape& shape, int rank);
std::vector<Entry> one_forward_one_backward(const PipelineShape& shape, int rank);
std::vector<Entry> interleaved_1f1b(const PipelineShape& shape, int rank);
std::vector<Entry> zb_h1(const PipelineShape& shape, int rank);
std::vector<Entry> zb_h2(const PipelineShape& shape, int rank);
std::vector<Entry> interleaved_zb(const PipelineShape& shape, int rank);
std::vector<Entry> zb_v(const PipelineShape& shape, int rank);
std::vector<Entry> dualpipe_v(const PipelineShape& shape, int rank);

}  // namespace pydist
