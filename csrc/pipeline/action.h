// One action of a schedule: what a rank computes, for which stage and microbatch. Pure.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace pydist {

enum class ActionKind : uint8_t {
  kForward,   // F
  kBackward,  // B: I and W in one
  kInput,     // I: gradients of the stage's inputs
  kWeight,    // W: gradients of its parameters
};

// The letter that stands for a kind in text.
char letter(ActionKind kind);

struct Action {
  int stage = 0;
  ActionKind kind = ActionKind::kForward;
  int microbatch = 0;

  // "0F3": stage 0, forward, microbatch 3.
  std::string text() const;
  bool operator==(const Action& other) const {
    return stage == other.stage && kind == other.kind && microbatch == other.microbatch;
  }
};

// One place in a rank's list: an action, or a pair that is overlapped: what both need is there
// before either starts, and what both give is there after both have ended.
struct Entry {
  Action first;
  std::optional<Action> second = std::nullopt;

  // "0F3", or "0F3&5B1".
  std::string text() const;
  // Raises ScheduleError, which quotes the text.
  static Entry parse(std::string_view text);
  bool operator==(const Entry& other) const {
    return first == other.first && second == other.second;
  }
};

}  // namespace pydist
