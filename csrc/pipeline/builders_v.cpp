// Schedules of V placement, two stages a rank, first there and then back: zb-v (Qi et al. 2024,
// "Pipeline Parallelism with Controllable Memory") and dualpipe-v (DeepSeek's DualPipeV, "cut in
// half" from DualPipe). A rank's earlier stage is called a, its later one b.
#include <algorithm>
#include <array>
#include <deque>

#include "pipeline/builder_kinds.h"

namespace pydist {

namespace {

constexpr int kA = 0;
constexpr int kB = 1;

// Hands out actions, each stage and kind in ascending order of microbatches.
class VRank {
 public:
  VRank(const PipelineShape& shape, int rank)
      : num_microbatches_(shape.num_microbatches), stages_{rank, 2 * shape.num_ranks - 1 - rank} {}

  // The next one; `false`: it is beyond the last microbatch, and left out.
  bool add(int which, ActionKind kind) {
    const Action action = next(which, kind);
    if (action.microbatch >= num_microbatches_) return false;
    entries_.push_back({action});
    return true;
  }
  void add_pair(int forward, int backward) {
    const Action first = next(forward, ActionKind::kForward);
    entries_.push_back({first, next(backward, ActionKind::kBackward)});
  }
  // An I whose W is put into the queue.
  void add_input(int which) {
    const Action input = next(which, ActionKind::kInput);
    entries_.push_back({input});
    queued_.push_back({input.stage, ActionKind::kWeight, input.microbatch});
  }
  void add_queued_weight() {
    entries_.push_back({queued_.front()});
    queued_.pop_front();
  }
  void add_backward(int which) { entries_.push_back({next(which, ActionKind::kBackward)}); }
  void add_backward(int which, bool splits) { splits ? add_input(which) : add_backward(which); }

  std::vector<Entry> take() { return std::move(entries_); }

 private:
  // B and I count together.
  static size_t index(int which, ActionKind kind) {
    const ActionKind counted = kind == ActionKind::kBackward ? ActionKind::kInput : kind;
    return static_cast<size_t>(which) * 4 + static_cast<size_t>(counted);
  }
  Action next(int which, ActionKind kind) {
    return {stages_[static_cast<size_t>(which)], kind, counters_[index(which, kind)]++};
  }

  const int num_microbatches_;
  const std::array<int, 2> stages_;
  std::array<int, 8> counters_ = {};
  std::vector<Entry> entries_;
  std::deque<Action> queued_;
};

}  // namespace

// As for max(m, 2p-1) microbatches; what is beyond m is left out.
std::vector<Entry> zb_v(const PipelineShape& shape, int rank) {
  const int p = shape.num_ranks;
  const int n = std::max(shape.num_microbatches, 2 * p - 1);
  VRank list(shape, rank);
  int forwards_a = 0;
  int forwards_b = 0;
  const auto forward_a = [&] {
    ++forwards_a;
    list.add(kA, ActionKind::kForward);
  };
  const auto forward_b = [&] {
    ++forwards_b;
    list.add(kB, ActionKind::kForward);
  };
  const auto backward = [&](int which) {
    list.add(which, ActionKind::kInput);
    list.add(which, ActionKind::kWeight);
  };
  for (int i = 0; i < 2 * (p - rank) - 1; ++i) forward_a();
  for (int i = 0; i < rank; ++i) {
    forward_b();
    forward_a();
  }
  for (int i = 0; i < p - rank; ++i) {
    forward_b();
    backward(kB);
  }
  while (forwards_b < n) {
    if (forwards_a < n) forward_a();
    backward(kA);
    forward_b();
    backward(kB);
  }
  for (int i = 0; i < rank; ++i) {
    list.add(kA, ActionKind::kInput);
    list.add(kB, ActionKind::kInput);
  }
  for (int i = 0; i < p - rank; ++i) backward(kA);
  while (list.add(kB, ActionKind::kWeight)) {
  }
  while (list.add(kA, ActionKind::kWeight)) {
  }
  return list.take();
}

// The eight phases of DualPipeV. Needs m >= 2p.
std::vector<Entry> dualpipe_v(const PipelineShape& shape, int rank) {
  const int p = shape.num_ranks;
  const int behind = p - 1 - rank;  // ranks
  VRank list(shape, rank);
  for (int i = 0; i < 2 * behind; ++i) list.add(kA, ActionKind::kForward);
  for (int i = 0; i < rank + 1; ++i) {
    list.add(kA, ActionKind::kForward);
    list.add(kB, ActionKind::kForward);
  }
  for (int i = 0; i < behind; ++i) {
    list.add_input(kB);
    list.add_queued_weight();
    list.add(kB, ActionKind::kForward);
  }
  for (int i = 0; i < shape.num_microbatches - 2 * p + rank + 1; ++i) {
    if (i == 0 && rank == p - 1) {
      list.add(kA, ActionKind::kForward);
      list.add_backward(kB);
    } else {
      list.add_pair(kA, kB);
    }
    list.add_pair(kB, kA);
  }
  for (int i = 0; i < behind; ++i) {
    list.add_backward(kB);
    list.add_pair(kB, kA);
  }
  // From the middle on, W waits for the gaps at the end.
  const int middle = (rank + 1) / 2;
  for (int i = 0; i < rank + 1; ++i) {
    list.add_backward(kB, i > middle || (i == middle && rank % 2 == 1));
    list.add_backward(kA, i >= middle);
  }
  for (int i = 0; i < behind; ++i) {
    list.add_queued_weight();
    list.add_input(kA);
  }
  for (int i = 0; i < rank + 1; ++i) list.add_queued_weight();
  return list.take();
}

}  // namespace pydist
