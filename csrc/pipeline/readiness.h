// The one rule of what an action needs and gives; lowering, validator, simulator and search ask it.
//
//   F  of stage s needs F of stage s-1, and gives the output of s;
//   B or I of s   needs the output of s itself and B or I of s+1, and gives the input gradient of
//   s; W  of s       needs I of s, and gives nothing to others;
//
// always of the same microbatch. On one rank entries run in the order of its list, one at a time.
// An overlapped pair needs what both need before it starts, and gives what both give when it ends.
// Pure.
#pragma once

#include <array>
#include <functional>
#include <optional>
#include <vector>

#include "pipeline/action.h"
#include "pipeline/schedule.h"

namespace pydist {

enum class StageValueKind : uint8_t {
  kOutput,         // of a stage, given by its F
  kInputGradient,  // of a stage, given by its B or I
};

// What an action gives, and others need.
struct StageValue {
  StageValueKind kind = StageValueKind::kOutput;
  int stage = 0;
  int microbatch = 0;
};

// What one action needs; at most two values.
struct Needs {
  std::array<StageValue, 2> values;
  int size = 0;
  const StageValue* begin() const { return values.data(); }
  const StageValue* end() const { return values.data() + size; }
};

Needs needs_of(const Action& action, int num_stages);
std::optional<StageValue> given_by(const Action& action);

// Whether the action adds to parameter gradients: B and W.
inline bool accumulates(const Action& action) {
  return action.kind == ActionKind::kBackward || action.kind == ActionKind::kWeight;
}

// One T for each value of a schedule.
template <class T>
class ByStageValue {
 public:
  ByStageValue(const Schedule& schedule, T initial)
      : num_stages_(static_cast<size_t>(schedule.num_stages())),
        num_microbatches_(static_cast<size_t>(schedule.num_microbatches)),
        values_(2 * num_stages_ * num_microbatches_, initial) {}
  T& operator[](const StageValue& value) { return values_[index(value)]; }
  const T& operator[](const StageValue& value) const { return values_[index(value)]; }

 private:
  size_t index(const StageValue& value) const {
    const size_t kind = static_cast<size_t>(value.kind);
    const size_t stage = static_cast<size_t>(value.stage);
    return (kind * num_stages_ + stage) * num_microbatches_ + static_cast<size_t>(value.microbatch);
  }

  size_t num_stages_;
  size_t num_microbatches_;
  std::vector<T> values_;
};

// Visits entries in an order in which they may run, as far as there is one, and returns by rank how
// many it visited: fewer than there are where entries wait for each other in a circle. Each value
// must be given at most once.
using VisitEntry = std::function<void(Place place, const Entry& entry)>;
std::vector<int> visit_in_order(const Schedule& schedule, const VisitEntry& visit);

}  // namespace pydist
