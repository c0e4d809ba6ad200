// A captured graph: what was enqueued, on which of its streams, and how events order them.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/device_runtime.h"
#include "clock.h"

namespace pydist::emulation {

struct StreamState;

// Tried until it returns true.
using Step = std::function<bool()>;

// Something to enqueue.
struct Call {
  std::string what;
  std::function<void(const VisitAccess&)> visit;
  std::function<Step()> begin;                 // at every replay anew
  std::function<void(const Deed&)> note = {};  // told when it is enqueued
};

struct Graph {
  struct Node {
    enum class Kind { kCall, kRecord, kWait };
    Kind kind;
    size_t lane;
    Call call = {};
    size_t mark = 0;
  };

  bool is_open = true;
  std::vector<Node> nodes;
  std::vector<StreamState*> captured;  // by lane; the first is where the capture began
  std::vector<Clock> clocks;           // by lane, whose participants are lanes
  std::vector<StreamState*> lanes;     // that replay it; made at the first replay
  size_t num_marks = 0;
};

}  // namespace pydist::emulation
