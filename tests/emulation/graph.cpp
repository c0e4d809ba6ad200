// Capture of graphs, and their replay.
#include "graph.h"

#include "device.h"
#include "faults.h"

namespace pydist::emulation {

namespace {

void join_capture(StreamState& stream, const std::shared_ptr<Graph>& graph) {
  stream.capture = graph;
  stream.lane = graph->captured.size();
  graph->captured.push_back(&stream);
  graph->clocks.emplace_back();
}

}  // namespace

void Device::begin_capture(StreamState& stream) {
  const Lock lock(mutex_);
  if (stream.capture != nullptr) record_fault(stream.name + " is being captured already");
  raise_fault();
  ++num_captures_;
  join_capture(stream, std::make_shared<Graph>());
}

// A wait that a capture is a part of: it may make another stream join the capture.
void Device::capture_wait(StreamState& stream, const Moment& moment) {
  if (moment.graph == nullptr) {
    record_fault(stream.name + " is captured and waits for an event that was recorded outside of " +
                 "the capture");
  } else if (!moment.graph->is_open) {
    record_fault(stream.name + " waits for an event that was recorded in a capture that has ended");
  } else if (stream.capture != nullptr && stream.capture != moment.graph) {
    record_fault(stream.name + " waits for an event of another capture than its own");
  }
  raise_fault();
  if (stream.capture == nullptr) join_capture(stream, moment.graph);
  Graph& graph = *stream.capture;
  graph.clocks[stream.lane].join(moment.clock);
  graph.nodes.push_back({Graph::Node::Kind::kWait, stream.lane, {}, moment.mark});
}

std::shared_ptr<Graph> Device::end_capture(StreamState& stream) {
  const Lock lock(mutex_);
  const std::shared_ptr<Graph> graph = stream.capture;
  if (graph == nullptr || graph->captured.front() != &stream) {
    record_fault("a capture ends on " + stream.name + ", where none began");
  }
  raise_fault();
  graph->is_open = false;
  --num_captures_;
  for (size_t lane = 0; lane < graph->captured.size(); ++lane) {
    graph->captured[lane]->capture = nullptr;
    Clock last = graph->clocks[lane];
    const Epoch next = last.advance(lane);
    if (lane > 0 && next.tick > 1 && !graph->clocks[0].covers({lane, next.tick - 1})) {
      record_fault("a capture ends, and " + stream.name + " has not waited for what " +
                   graph->captured[lane]->name + " has captured");
    }
  }
  raise_fault();
  return graph;
}

// Its streams are the graph's own and as late as any. What is done here can be read off the tables
// of kernels only when it runs, since the graph itself may fill them.
void Device::replay(const std::shared_ptr<Graph>& graph, StreamState& stream) {
  while (graph->lanes.size() < graph->captured.size()) {
    graph->lanes.push_back(make_stream("graph's", false));
  }
  Lock lock(mutex_);
  check_usable(stream, "replay()");
  if (stream.capture != nullptr) record_fault("a graph is replayed on a stream that is captured");
  raise_fault();
  std::vector<MomentPointer> moments(graph->num_marks);
  const auto record_on = [&](StreamState& on) {
    auto moment = std::make_shared<Moment>();
    moment->clock = make_deed(on, "record()")->clock;
    push(on, {Task::Kind::kRecord, "record()", nullptr, moment});
    return moment;
  };
  const auto wait_on = [&](StreamState& on, const MomentPointer& moment) {
    make_deed(on, "wait()");
    on.clock.join(moment->clock);
    push(on, {Task::Kind::kWait, "wait()", nullptr, moment});
  };
  const MomentPointer begin = record_on(stream);
  for (StreamState* lane : graph->lanes) wait_on(*lane, begin);
  for (const Graph::Node& node : graph->nodes) {
    StreamState& lane = *graph->lanes[node.lane];
    if (node.kind == Graph::Node::Kind::kCall) enqueue_now(lane, node.call, true);
    if (node.kind == Graph::Node::Kind::kRecord) moments[node.mark] = record_on(lane);
    if (node.kind == Graph::Node::Kind::kWait) wait_on(lane, moments[node.mark]);
  }
  for (StreamState* lane : graph->lanes) wait_on(stream, record_on(*lane));
  wait_if_eager(lock, stream, "a graph's replay");
}

}  // namespace pydist::emulation
