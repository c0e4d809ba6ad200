// What a channel is made from. Pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace pydist {

struct ChannelOptions {
  int rank = 0;
  int size = 1;
  double timeout_s = 1800;             // of set-up and of every wait
  std::string name = "the pipeline";   // for messages
  std::vector<int> global_ranks = {};  // for messages; empty: 0..size-1
  // Equal on all ranks. 0: as large as the number of ranks allows.
  size_t ring_nbytes = 0;
  size_t max_lent_nbytes = SIZE_MAX;  // of the arena, for messages on their way
};

}  // namespace pydist
