// What a stage keeps of one microbatch, from its arrival to the end of its backward.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "pipeline/backward_cut.h"
#include "pipeline/channel.h"

namespace pydist {

// A way between two stages, seen from one of them. Port 0 leads to the neighbour; the others are
// skips, which carry one tensor each.
struct Link {
  int port = 0;
  int stage = 0;          // at the other end
  int rank = 0;           // that holds it
  std::string skip = {};  // its name
};

// What went over one link: a flag for each slot of the value, set if a gradient comes back for it.
class GradientSlots {
 public:
  void clear() {
    wanted_.clear();
    any_ = false;
  }
  void add(bool wanted) {
    wanted_.push_back(wanted);
    any_ = any_ || wanted;
  }
  size_t size() const { return wanted_.size(); }
  bool wants(size_t slot) const { return wanted_[slot] != 0; }
  bool any() const { return any_; }

 private:
  std::vector<uint8_t> wanted_;
  bool any_ = false;
};

struct StageFlight {
  bool absent = false;
  // By link: what another stage of this rank has handed over.
  std::vector<std::optional<Message>> inputs = {};
  std::vector<std::optional<Message>> gradients = {};
  // By link: what is to be sent back, and what is to come.
  std::vector<GradientSlots> from = {};
  std::vector<GradientSlots> to = {};
  std::optional<StageBackward> backward = std::nullopt;  // from F to B or W, in training
  at::Tensor loss = {};                                  // of the last stage, detached

  StageFlight(size_t num_in, size_t num_out)
      : inputs(num_in), gradients(num_out), from(num_in), to(num_out) {}
  // Frees the graph.
  void clear() {
    absent = false;
    for (auto& input : inputs) input.reset();
    for (auto& gradient : gradients) gradient.reset();
    for (auto& slots : from) slots.clear();
    for (auto& slots : to) slots.clear();
    backward.reset();
    loss.reset();
  }
};

}  // namespace pydist
